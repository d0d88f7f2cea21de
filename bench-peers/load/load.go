// Package load does the operations of a trace on a store, as the Rust side of the benchmarks does: closed loop, or open loop with
// latencies counted from when each operation was due. What was not done does not vanish: it counts by when it began or was due,
// and only refusals, which most often come at once, are not among the latencies. It is told what to do line by line as JSON on standard input, and
// answers on standard output (crates/server/src/bench/systems/gopeer.rs has the other end).
package load

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Pair is a key and its value.
type Pair struct{ Key, Value []byte }

// ErrRefused is, or is wrapped in, an error after which nothing was done and nobody waited in vain.
var ErrRefused = errors.New("refused")

// Store is what is measured. Its methods are called from many goroutines. After errors other than ErrRefused nobody knows
// whether it was done.
type Store interface {
	// Write writes one pair, or several as an atomic batch.
	Write(worker int, pairs []Pair) error
	// Read reads a key.
	Read(worker int, key []byte) error
}

// Acts of a trace.
const (
	actWrite = iota
	actRead
	actReadWrite
	actInsert
)

type op struct {
	key uint64
	len uint32
	act uint8
}

type task struct {
	Do        string  `json:"do"`
	Trace     string  `json:"trace"`
	KeyBytes  int     `json:"key_bytes"`
	Batch     int     `json:"batch"`
	Inflight  int     `json:"inflight"`
	Rate      float64 `json:"rate"`
	WarmUpMs  int64   `json:"warm_up_ms"`
	MeasureMs int64   `json:"measure_ms"`
	DrainMs   int64   `json:"drain_ms"`
}

type result struct {
	Operations uint64      `json:"operations"`
	Refused    uint64      `json:"refused"`
	Unfinished uint64      `json:"unfinished"`
	Latencies  [][2]uint64 `json:"latencies"`
}

var out struct {
	sync.Mutex
	*json.Encoder
}

func say(what string, value any) {
	out.Lock()
	defer out.Unlock()
	// Without a reader there is nobody to tell.
	_ = out.Encode(map[string]any{what: value})
}

// Serve does what it is told until standard input ends.
func Serve(store Store) {
	out.Encoder = json.NewEncoder(os.Stdout)
	say("phase", "ready")
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var task task
		if err := json.Unmarshal(lines.Bytes(), &task); err != nil {
			Fail(fmt.Errorf("a task that cannot be read: %w", err))
		}
		ops, err := readTrace(task.Trace)
		if err != nil {
			Fail(err)
		}
		switch task.Do {
		case "preload":
			err = preload(store, &task, ops)
			if err == nil {
				say("result", result{Latencies: [][2]uint64{}})
			}
		case "measure":
			say("result", measure(store, &task, ops))
		default:
			err = fmt.Errorf("%q cannot be done", task.Do)
		}
		if err != nil {
			Fail(err)
		}
	}
}

// Fail says why nothing more will come, and ends.
func Fail(err error) {
	if out.Encoder == nil {
		out.Encoder = json.NewEncoder(os.Stdout)
	}
	say("error", err.Error())
	os.Exit(1)
}

func readTrace(path string) ([]op, error) {
	bytes, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(bytes) == 0 || len(bytes)%16 != 0 {
		return nil, fmt.Errorf("%s is no trace: %d bytes", path, len(bytes))
	}
	ops := make([]op, len(bytes)/16)
	for i := range ops {
		line := bytes[16*i:]
		ops[i] = op{binary.LittleEndian.Uint64(line), binary.LittleEndian.Uint32(line[8:]), line[12]}
	}
	return ops, nil
}

// Key is a number's key: eight bytes that scatter, and dots.
func Key(number uint64, size int) []byte {
	mixed := number + 0x9e3779b97f4a7c15
	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb
	mixed ^= mixed >> 31
	key := make([]byte, max(size, 8))
	binary.BigEndian.PutUint64(key, mixed)
	for i := 8; i < len(key); i++ {
		key[i] = '.'
	}
	return key
}

const slack = 1 << 16

// Bytes that do not compress.
var random = sync.OnceValue(func() []byte {
	bytes := make([]byte, 1_000_000+slack)
	rand.New(rand.NewSource(1)).Read(bytes)
	return bytes
})

func value(size uint32, salt uint64) []byte {
	from := salt % slack
	return random()[from : from+uint64(min(size, 1_000_000))]
}

func preload(store Store, task *task, ops []op) error {
	var next, done atomic.Uint64
	var group sync.WaitGroup
	var fault atomic.Value
	for worker := range task.Inflight {
		group.Add(1)
		go func() {
			defer group.Done()
			for fault.Load() == nil {
				i := next.Add(1) - 1
				if i >= uint64(len(ops)) {
					return
				}
				pair := []Pair{{Key(ops[i].key, task.KeyBytes), value(ops[i].len, i)}}
				err := store.Write(worker, pair)
				for try := 0; err != nil && try < 100; try++ {
					time.Sleep(10 * time.Millisecond)
					err = store.Write(worker, pair)
				}
				if err != nil {
					fault.Store(err)
					return
				}
				if count := done.Add(1); count%1000 == 0 {
					say("live", count)
				}
			}
		}()
	}
	group.Wait()
	if err, failed := fault.Load().(error); failed {
		return err
	}
	return nil
}

// One worker's counts.
type seen struct {
	operations, refused, unfinished uint64
	latencies                       []time.Duration
}

// Records how an operation ended that began, or was due, in the measured time.
func (s *seen) end(err error, waited time.Duration) {
	switch {
	case err == nil:
		s.latencies = append(s.latencies, waited)
	case errors.Is(err, ErrRefused):
		s.refused++
	default:
		s.neverEnded(waited)
	}
}

// What never ended took at least this long.
func (s *seen) neverEnded(waited time.Duration) {
	s.unfinished++
	s.latencies = append(s.latencies, waited)
}

func measure(store Store, task *task, ops []op) result {
	ms := func(count int64) time.Duration { return time.Duration(count) * time.Millisecond }
	begun := time.Now()
	from := begun.Add(ms(task.WarmUpMs))
	until := from.Add(ms(task.MeasureMs))
	last := until.Add(ms(task.DrainMs))
	var next, done atomic.Uint64
	workers := make([]seen, task.Inflight)
	ended := make(chan struct{})
	var group sync.WaitGroup
	for worker := range task.Inflight {
		group.Add(1)
		go func() {
			defer group.Done()
			seen := &workers[worker]
			for {
				number := next.Add(1) - 1
				began := time.Now()
				if task.Rate > 0 {
					began = begun.Add(time.Duration(float64(number) * 1e9 / task.Rate))
					if !began.Before(until) {
						return
					}
					time.Sleep(time.Until(began))
				}
				now := time.Now()
				if task.Rate <= 0 && !now.Before(until) || !now.Before(last) {
					// What was due and never sent is one that never ended.
					if task.Rate > 0 && !began.Before(from) {
						seen.neverEnded(now.Sub(began))
					}
					return
				}
				err := carryOut(store, worker, task, ops, number)
				end := time.Now()
				done.Add(1)
				if err == nil && !end.Before(from) && end.Before(until) {
					seen.operations++
				}
				if !began.Before(from) && began.Before(until) {
					seen.end(err, end.Sub(began))
				}
			}
		}()
	}
	var telling sync.WaitGroup
	telling.Add(1)
	go func() {
		defer telling.Done()
		tell(from, until, &done, ended)
	}()
	group.Wait()
	close(ended)
	telling.Wait()
	return merged(workers, task, next.Load(), begun, from, until)
}

// Tells how far it is, and when the measured time begins and ends.
func tell(from, until time.Time, done *atomic.Uint64, ended chan struct{}) {
	for _, phase := range []struct {
		name string
		at   time.Time
	}{{"from", from}, {"until", until}} {
	waiting:
		for time.Now().Before(phase.at) {
			select {
			case <-ended:
				break waiting
			case <-time.After(min(200*time.Millisecond, time.Until(phase.at))):
			}
			say("live", done.Load())
		}
		say("phase", phase.name)
	}
}

func carryOut(store Store, worker int, task *task, ops []op, number uint64) error {
	batch := uint64(max(task.Batch, 1))
	op := ops[number*batch%uint64(len(ops))]
	key := Key(op.key, task.KeyBytes)
	if op.act == actRead {
		return store.Read(worker, key)
	}
	if op.act == actReadWrite {
		if err := store.Read(worker, key); err != nil {
			return err
		}
	}
	pairs := []Pair{{key, value(op.len, number)}}
	for i := uint64(1); i < batch && op.act == actWrite; i++ {
		other := ops[(number*batch+i)%uint64(len(ops))]
		pairs = append(pairs, Pair{Key(other.key, task.KeyBytes), value(other.len, number+i)})
	}
	return store.Write(worker, pairs)
}

func merged(workers []seen, task *task, next uint64, begun, from, until time.Time) result {
	var sum result
	counts := map[uint64]uint64{}
	count := func(waited time.Duration) { counts[rounded(uint64(max(waited, 1)))]++ }
	for _, worker := range workers {
		sum.Operations += worker.operations
		sum.Refused += worker.refused
		sum.Unfinished += worker.unfinished
		for _, waited := range worker.latencies {
			count(waited)
		}
	}
	// What nobody came to take was due and never ended either.
	if task.Rate > 0 {
		now := time.Now()
		for number := next; ; number++ {
			due := begun.Add(time.Duration(float64(number) * 1e9 / task.Rate))
			if !due.Before(until) {
				break
			}
			if !due.Before(from) {
				sum.Unfinished++
				count(now.Sub(due))
			}
		}
	}
	sum.Latencies = make([][2]uint64, 0, len(counts))
	for ns, times := range counts {
		sum.Latencies = append(sum.Latencies, [2]uint64{ns, times})
	}
	sort.Slice(sum.Latencies, func(a, b int) bool { return sum.Latencies[a][0] < sum.Latencies[b][0] })
	return sum
}

// Three digits are enough.
func rounded(ns uint64) uint64 {
	unit := uint64(1)
	for ns/unit >= 2000 {
		unit *= 10
	}
	return ns / unit * unit
}
