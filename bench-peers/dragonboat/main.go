// One dragonboat replica over a map in memory; with -serve also the load, which so runs inside the leader.
package main

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"cyclone/bench-peers/load"
	"github.com/lni/dragonboat/v3"
	"github.com/lni/dragonboat/v3/config"
	"github.com/lni/dragonboat/v3/logger"
	"github.com/lni/dragonboat/v3/statemachine"
)

const cluster = 1

// kv is a map; a command is pairs of length-prefixed keys and values.
type kv struct {
	sync.RWMutex
	values map[string][]byte
}

func (s *kv) Update(command []byte) (statemachine.Result, error) {
	s.Lock()
	defer s.Unlock()
	for len(command) > 0 {
		var key, value []byte
		if key, command = field(command); command == nil {
			return statemachine.Result{}, errors.New("a command that is cut off")
		}
		value, command = field(command)
		s.values[string(key)] = value
	}
	return statemachine.Result{Value: 1}, nil
}

// A field's own bytes and what follows; nil when it is cut off.
func field(bytes []byte) ([]byte, []byte) {
	if len(bytes) < 4 {
		return nil, nil
	}
	size := binary.LittleEndian.Uint32(bytes)
	if uint64(len(bytes)-4) < uint64(size) {
		return nil, nil
	}
	return bytes[4 : 4+size], bytes[4+size:]
}

func (s *kv) Lookup(key any) (any, error) {
	s.RLock()
	defer s.RUnlock()
	return s.values[string(key.([]byte))], nil
}

// The benchmark's snapshots are switched off.
func (s *kv) SaveSnapshot(io.Writer, statemachine.ISnapshotFileCollection, <-chan struct{}) error {
	return errors.New("no snapshots")
}

func (s *kv) RecoverFromSnapshot(io.Reader, []statemachine.SnapshotFile, <-chan struct{}) error {
	return errors.New("no snapshots")
}

func (s *kv) Close() error { return nil }

type store struct{ host *dragonboat.NodeHost }

const patience = 5 * time.Second

func (s *store) Write(_ int, pairs []load.Pair) error {
	var command []byte
	for _, pair := range pairs {
		for _, bytes := range [][]byte{pair.Key, pair.Value} {
			command = binary.LittleEndian.AppendUint32(command, uint32(len(bytes)))
			command = append(command, bytes...)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := s.host.SyncPropose(ctx, s.host.GetNoOPSession(cluster), command)
	return told(err)
}

func (s *store) Read(_ int, key []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := s.host.SyncRead(ctx, cluster, key)
	return told(err)
}

func (s *store) Scan(int, []byte, int) error {
	return fmt.Errorf("range scans %w: its map has no order", load.ErrCannot)
}

// told marks what is dropped before anything is done: the queue is full, or there is no leader. After others it is unknown.
func told(err error) error {
	if errors.Is(err, dragonboat.ErrSystemBusy) || errors.Is(err, dragonboat.ErrClusterNotReady) {
		return fmt.Errorf("%w: %w", load.ErrRefused, err)
	}
	return err
}

func main() {
	replica := flag.Uint64("replica", 1, "number of this replica, from 1")
	list := flag.String("members", "", "addresses of the replicas, by commas")
	data := flag.String("data", "", "directory of the log")
	serve := flag.Bool("serve", false, "put load on it, as told on standard input")
	flag.Parse()
	for _, name := range []string{"dragonboat", "raft", "rsm", "transport", "logdb", "grpc", "config", "settings", "utils"} {
		logger.GetLogger(name).SetLevel(logger.ERROR)
	}
	members := map[uint64]string{}
	for i, address := range strings.Split(*list, ",") {
		members[uint64(i)+1] = address
	}
	host, err := dragonboat.NewNodeHost(config.NodeHostConfig{
		NodeHostDir:    *data,
		WALDir:         *data,
		RTTMillisecond: 10,
		RaftAddress:    members[*replica],
	})
	if err != nil {
		load.Fail(err)
	}
	create := func(uint64, uint64) statemachine.IStateMachine { return &kv{values: map[string][]byte{}} }
	err = host.StartCluster(members, false, create, config.Config{
		NodeID: *replica, ClusterID: cluster, ElectionRTT: 50, HeartbeatRTT: 5, CheckQuorum: true,
	})
	if err != nil {
		load.Fail(err)
	}
	if !*serve {
		select {}
	}
	if err := lead(host, *replica); err != nil {
		load.Fail(err)
	}
	load.Serve(&store{host})
}

// Waits until this replica leads, asking another leader to hand over.
func lead(host *dragonboat.NodeHost, replica uint64) error {
	for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(100 * time.Millisecond) {
		leader, valid, err := host.GetLeaderID(cluster)
		if err == nil && valid && leader == replica {
			return nil
		}
		if err == nil && valid {
			_ = host.RequestLeaderTransfer(cluster, replica)
		}
	}
	return fmt.Errorf("replica %d does not come to lead", replica)
}
