// Package load does the operations of a trace on a store, as the Rust side of the benchmarks does: closed loop, or open loop with
// latencies counted from when each operation was due. What was not done does not vanish: it counts by when it began or was due,
// and only refusals, which most often come at once, are not among the latencies. It receives commands line by line as JSON on standard input, and
// answers on standard output (crates/bench-cli/src/systems/gopeer.rs has the other end).
package load

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Pair is a key and its value.
type Pair struct{ Key, Value []byte }

// ErrRefused is, or is wrapped in, an error after which nothing was done and no caller waited without an answer.
var ErrRefused = errors.New("refused")

// ErrCannot is, or is wrapped in, an error of a store that can never do what it was asked: there is nothing to measure, and
// everything ends.
var ErrCannot = errors.New("cannot be done here")

// Store is what is measured. Its methods are called from many goroutines. After errors other than these two it is unknown
// whether it was done.
type Store interface {
	// Write writes one pair, or several as an atomic batch.
	Write(worker int, pairs []Pair) error
	// Read reads a key.
	Read(worker int, key []byte) error
	// Scan reads so many keys in order, from one on.
	Scan(worker int, key []byte, keys int) error
}

// Acts of a trace.
const (
	actWrite = iota
	actRead
	actReadWrite
	actInsert
	actScan
)

type op struct {
	key uint64
	// Bytes of the value; for a scan, how many keys.
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
	// How many operations were begun, warm-up included, each of `batch` lines of the trace, which begins again at its end: tells
	// which keys may have been inserted.
	Begun uint64 `json:"begun"`
	// The median of how long after they were due operations began, in the open loop: unless all workers were busy, so much of
	// the latencies is this program's doing.
	LateUs uint64 `json:"late_us"`
}

var out struct {
	sync.Mutex
	*json.Encoder
}

func say(what string, value any) {
	out.Lock()
	defer out.Unlock()
	// Without a reader there is no receiver.
	_ = out.Encode(map[string]any{what: value})
}

// Serve executes commands until standard input ends.
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
		if line[12] > actScan {
			return nil, fmt.Errorf("%s: operation %d has an unknown act, %d", path, i, line[12])
		}
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
	// How long after they were due operations began, in the open loop.
	late []time.Duration
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

// One measurement.
type measurement struct {
	store Store
	task  *task
	ops   []op
	// When it began, when the measured time begins and ends, and when nothing more is sent.
	begun, from, until, last time.Time
	// How many operations were begun, and how many have ended.
	taken, done atomic.Uint64
	workers     []seen
}

func measure(store Store, task *task, ops []op) result {
	ms := func(count int64) time.Duration { return time.Duration(count) * time.Millisecond }
	m := measurement{store: store, task: task, ops: ops, workers: make([]seen, task.Inflight), begun: time.Now()}
	m.from = m.begun.Add(ms(task.WarmUpMs))
	m.until = m.from.Add(ms(task.MeasureMs))
	m.last = m.until.Add(ms(task.DrainMs))
	var group sync.WaitGroup
	start := func(part func()) {
		group.Add(1)
		go func() {
			defer group.Done()
			part()
		}()
	}
	var handedOut uint64
	if task.Rate > 0 {
		numbers := make(chan uint64, ahead)
		start(func() {
			defer close(numbers)
			handedOut = handOut(numbers, m.due, m.until, m.last)
		})
		for worker := range m.workers {
			start(func() { m.open(worker, numbers) })
		}
	} else {
		for worker := range m.workers {
			start(func() { m.closed(worker) })
		}
	}
	ended := make(chan struct{})
	var telling sync.WaitGroup
	telling.Add(1)
	go func() {
		defer telling.Done()
		tell(m.from, m.until, &m.done, ended)
	}()
	group.Wait()
	close(ended)
	telling.Wait()
	return m.merged(handedOut)
}

// When an operation is due in the open loop.
func (m *measurement) due(number uint64) time.Time {
	return m.begun.Add(time.Duration(float64(number) * 1e9 / m.task.Rate))
}

// A worker of the closed loop: the next begins when one ends.
func (m *measurement) closed(worker int) {
	for began := time.Now(); began.Before(m.until); began = time.Now() {
		m.do(worker, m.taken.Add(1)-1, began)
	}
}

// A worker of the open loop: does what is due.
func (m *measurement) open(worker int, numbers <-chan uint64) {
	seen := &m.workers[worker]
	for number := range numbers {
		due, now := m.due(number), time.Now()
		if !now.Before(m.last) {
			// What was due and never sent is one that never ended.
			if !due.Before(m.from) {
				seen.neverEnded(now.Sub(due))
			}
			continue
		}
		if !due.Before(m.from) {
			seen.late = append(seen.late, now.Sub(due))
		}
		m.taken.Add(1)
		m.do(worker, number, due)
	}
}

// Does an operation that began, or was due, at a point in time.
func (m *measurement) do(worker int, number uint64, began time.Time) {
	err := carryOut(m.store, worker, m.task, m.ops, number)
	end := time.Now()
	if errors.Is(err, ErrCannot) {
		Fail(err)
	}
	m.done.Add(1)
	seen := &m.workers[worker]
	if err == nil && !end.Before(m.from) && end.Before(m.until) {
		seen.operations++
	}
	if !began.Before(m.from) && began.Before(m.until) {
		seen.end(err, end.Sub(began))
	}
}

// Reports its progress, and when the measured time begins and ends.
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
	switch op.act {
	case actRead:
		return store.Read(worker, key)
	case actScan:
		return store.Scan(worker, key, int(op.len))
	case actReadWrite:
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

func (m *measurement) merged(handedOut uint64) result {
	sum := result{Begun: m.taken.Load()}
	counts := map[uint64]uint64{}
	count := func(waited time.Duration) { counts[rounded(uint64(max(waited, 1)))]++ }
	var late []time.Duration
	for _, worker := range m.workers {
		sum.Operations += worker.operations
		sum.Refused += worker.refused
		sum.Unfinished += worker.unfinished
		for _, waited := range worker.latencies {
			count(waited)
		}
		late = append(late, worker.late...)
	}
	if len(late) > 0 {
		slices.Sort(late)
		sum.LateUs = uint64(late[len(late)/2].Microseconds())
	}
	// What was not even handed out was due and never ended either.
	if m.task.Rate > 0 {
		now := time.Now()
		for number := handedOut; ; number++ {
			due := m.due(number)
			if !due.Before(m.until) {
				break
			}
			if !due.Before(m.from) {
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
