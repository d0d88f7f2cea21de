// Loads three etcd members with puts through etcd's own client: the same keys, values and concurrency as the other
// systems of `cyclone bench put`. Prints one JSON line. With -serve it does what `cyclone bench run` tells it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	"cyclone/bench-peers/load"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

func main() {
	endpoints := flag.String("endpoints", "127.0.0.1:23790", "addresses of the members, by commas")
	inflight := flag.Int("inflight", 1, "puts outstanding at once")
	size := flag.Int("value", 100, "bytes of each value")
	warmup := flag.Duration("warmup", time.Second, "time before measuring")
	measure := flag.Duration("measure", 4*time.Second, "time measured")
	seed := flag.Int64("seed", 1, "seed of the keys")
	serve := flag.Bool("serve", false, "do what standard input says (cyclone bench run) instead")
	flag.Parse()

	all := strings.Split(*endpoints, ",")
	leader := findLeader(all)
	if *serve {
		load.Serve(&store{connect(leader, connections)})
		return
	}
	clients := connect(leader, min(*inflight, connections))
	connections := len(clients)
	value := strings.Repeat("v", *size)
	begun := time.Now()
	from, until := begun.Add(*warmup), begun.Add(*warmup+*measure)
	latencies := make([][]time.Duration, *inflight)
	var group sync.WaitGroup
	for worker := range *inflight {
		group.Add(1)
		go func() {
			defer group.Done()
			random := rand.New(rand.NewSource(*seed<<20 + int64(worker)))
			client := clients[worker%connections]
			for {
				sent := time.Now()
				if !sent.Before(until) {
					return
				}
				key := fmt.Sprintf("key:%012d", random.Intn(1_000_000))
				if _, err := client.Put(context.Background(), key, value); err != nil {
					log.Fatalf("etcdload: put: %v", err)
				}
				if done := time.Now(); !done.Before(from) && done.Before(until) {
					latencies[worker] = append(latencies[worker], done.Sub(sent))
				}
			}
		}()
	}
	group.Wait()
	var merged []time.Duration
	for _, part := range latencies {
		merged = append(merged, part...)
	}
	if len(merged) == 0 {
		log.Fatal("etcdload: no put ended within the measured time")
	}
	sort.Slice(merged, func(a, b int) bool { return merged[a] < merged[b] })
	micros := func(quantile float64) float64 {
		return float64(merged[int(quantile*float64(len(merged)-1))].Nanoseconds()) / 1000
	}
	err := json.NewEncoder(os.Stdout).Encode(map[string]any{
		"operations": len(merged),
		"seconds":    measure.Seconds(),
		"p50_us":     micros(0.5),
		"p99_us":     micros(0.99),
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A connection carries many streams; etcd's own benchmark uses about this many.
const connections = 16

func connect(endpoint string, count int) []*clientv3.Client {
	clients := make([]*clientv3.Client, count)
	for i := range clients {
		client, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, DialTimeout: 5 * time.Second})
		if err != nil {
			log.Fatalf("etcdload: %v", err)
		}
		clients[i] = client
	}
	return clients
}

// store is etcd as the benchmark's plans see it.
type store struct{ clients []*clientv3.Client }

const patience = 5 * time.Second

func (s *store) Write(worker int, pairs []load.Pair) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	client := s.clients[worker%len(s.clients)]
	if len(pairs) == 1 {
		_, err := client.Put(ctx, string(pairs[0].Key), string(pairs[0].Value))
		return told(err)
	}
	// A transaction may not put a key twice.
	seen := map[string]bool{}
	var puts []clientv3.Op
	for _, pair := range pairs {
		if key := string(pair.Key); !seen[key] {
			seen[key] = true
			puts = append(puts, clientv3.OpPut(key, string(pair.Value)))
		}
	}
	_, err := client.Txn(ctx).Then(puts...).Commit()
	return told(err)
}

func (s *store) Read(worker int, key []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := s.clients[worker%len(s.clients)].Get(ctx, string(key))
	return told(err)
}

// Without an order that is asked for, keys come in theirs.
func (s *store) Scan(worker int, key []byte, keys int) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// A limit of 0 would be none.
	limit := clientv3.WithLimit(int64(max(keys, 1)))
	_, err := s.clients[worker%len(s.clients)].Get(ctx, string(key), clientv3.WithFromKey(), limit)
	return told(err)
}

// told marks what the server refuses before it does anything; a timeout, or a leader that is lost, says nothing about it.
func told(err error) error {
	if errors.Is(err, rpctypes.ErrTooManyRequests) || errors.Is(err, rpctypes.ErrNoSpace) {
		return fmt.Errorf("%w: %w", load.ErrRefused, err)
	}
	return err
}

// findLeader waits for the members and answers the leader's address: the shortest way for a put.
func findLeader(endpoints []string) string {
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: 5 * time.Second})
	if err != nil {
		log.Fatalf("etcdload: %v", err)
	}
	defer client.Close()
	for begun := time.Now(); time.Since(begun) < 15*time.Second; time.Sleep(100 * time.Millisecond) {
		for _, endpoint := range endpoints {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			status, err := client.Status(ctx, endpoint)
			cancel()
			if err == nil && status.Leader != 0 && status.Leader == status.Header.MemberId {
				return endpoint
			}
		}
	}
	log.Fatal("etcdload: no leader")
	return ""
}
