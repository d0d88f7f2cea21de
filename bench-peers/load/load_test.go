package load

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// The Rust side's test has the same keys.
func TestKeysAreThoseOfTheOtherSide(t *testing.T) {
	for number, want := range map[uint64]string{
		0: "e220a8397b1dcdaf", 1: "910a2dec89025cc1", 1_000_000: "680d1cce9cff45e7",
	} {
		if got := hex.EncodeToString(Key(number, 8)); got != want {
			t.Errorf("key %d is %s, not %s", number, got, want)
		}
	}
	if got := string(Key(0, 12)[8:]); got != "...." {
		t.Errorf("a longer key ends in %q", got)
	}
}

// A store at which nothing happens; it counts what it is asked.
type idle struct{ calls atomic.Uint64 }

func (s *idle) Write(int, []Pair) error {
	s.calls.Add(1)
	return nil
}

func (s *idle) Read(int, []byte) error {
	s.calls.Add(1)
	return nil
}

func (s *idle) Scan(int, []byte, int) error {
	s.calls.Add(1)
	return nil
}

// How many operations were recorded, and how many of them took so many milliseconds or more.
func recorded(result result, ms uint64) (all, slow uint64) {
	for _, bucket := range result.Latencies {
		all += bucket[1]
		if bucket[0] >= ms*1_000_000 {
			slow += bucket[1]
		}
	}
	return all, slow
}

var writes = []op{{key: 1, len: 8, act: actWrite}}

type stalling struct {
	idle
	begun time.Time
}

// Nothing is answered between 100 and 300 ms.
func (s *stalling) Write(worker int, pairs []Pair) error {
	since := time.Since(s.begun)
	if since > 100*time.Millisecond && since < 300*time.Millisecond {
		time.Sleep(300*time.Millisecond - since)
	}
	return s.idle.Write(worker, pairs)
}

func TestAStallAppearsInTheTailOfTheOpenLoop(t *testing.T) {
	store := &stalling{begun: time.Now()}
	task := task{KeyBytes: 8, Batch: 1, Inflight: 4, Rate: 1000, WarmUpMs: 50, MeasureMs: 400, DrainMs: 5000}
	result := measure(store, &task, writes)
	if result.Unfinished != 0 {
		t.Errorf("%d unfinished", result.Unfinished)
	}
	// What was due during the stall waited for the rest of it, however late this machine is.
	for _, ms := range []uint64{10, 50, 100, 150, 190} {
		if all, slow := recorded(result, ms); all != 400 || slow < 200-ms-2 {
			t.Errorf("%d of %d operations took %d ms or more", slow, all, ms)
		}
	}
	// Those of the warm-up count too.
	if calls := store.calls.Load(); calls != 450 || result.Begun != 450 {
		t.Errorf("%d begun, %d calls", result.Begun, calls)
	}
}

func TestTheClosedLoopBeginsWhatItCountsAndIsNeverLate(t *testing.T) {
	store := &idle{}
	task := task{KeyBytes: 8, Batch: 1, Inflight: 4, WarmUpMs: 10, MeasureMs: 50, DrainMs: 5000}
	result := measure(store, &task, writes)
	if calls := store.calls.Load(); calls == 0 || result.Begun != calls {
		t.Errorf("%d begun, %d calls", result.Begun, calls)
	}
	if result.LateUs != 0 {
		t.Errorf("%d µs late", result.LateUs)
	}
}

func TestTheOpenLoopIsPunctual(t *testing.T) {
	task := task{KeyBytes: 8, Batch: 1, Inflight: 4, Rate: 1000, MeasureMs: 200, DrainMs: 5000}
	// About 100 where nothing else runs.
	if late := measure(&idle{}, &task, writes).LateUs; late > 20_000 {
		t.Errorf("%d µs late", late)
	}
}

func TestNothingIsHandedOutBeforeItIsDue(t *testing.T) {
	begun := time.Now()
	due := func(number uint64) time.Time { return begun.Add(time.Duration(number) * 700 * time.Microsecond) }
	until := begun.Add(50 * time.Millisecond)
	numbers := make(chan uint64, 100)
	handedOut := make(chan uint64, 1)
	go func() {
		defer close(numbers)
		handedOut <- handOut(numbers, due, until, until)
	}()
	var count uint64
	for number := range numbers {
		if early := time.Until(due(number)); number != count || early > 0 {
			t.Errorf("%d came as number %d, %v early", number, count, early)
		}
		count++
	}
	if told := <-handedOut; count != 72 || told != count {
		t.Errorf("%d came, %d were handed out", count, told)
	}
}

// Answers nothing for a second.
type stuck struct {
	idle
	begun time.Time
}

func (s *stuck) Write(worker int, pairs []Pair) error {
	time.Sleep(time.Until(s.begun.Add(time.Second)))
	return s.idle.Write(worker, pairs)
}

func TestWhatIsNeverSentCountsAsUnfinished(t *testing.T) {
	for _, rate := range []float64{1000, 4 * ahead} {
		store := &stuck{begun: time.Now()}
		task := task{KeyBytes: 8, Batch: 1, Inflight: 2, Rate: rate, MeasureMs: 500, DrainMs: 50}
		result := measure(store, &task, writes)
		// Of the second rate half are not even handed out.
		due := uint64(rate / 2)
		if result.Unfinished != due-2 || result.Operations != 0 || result.Begun != 2 {
			t.Errorf("of %d: %d unfinished, %d ended, %d begun", due, result.Unfinished, result.Operations, result.Begun)
		}
		// Until the second is over, but for a late beginning of the measurement.
		if all, slow := recorded(result, 400); all != due || slow != due {
			t.Errorf("of %d: %d recorded, %d with the time waited", due, all, slow)
		}
	}
}

// Notes what it is asked.
type noting struct{ asked []string }

func (s *noting) Write(_ int, pairs []Pair) error {
	for _, pair := range pairs {
		s.asked = append(s.asked, fmt.Sprintf("write %x: %d", pair.Key, len(pair.Value)))
	}
	return nil
}

func (s *noting) Read(_ int, key []byte) error {
	s.asked = append(s.asked, fmt.Sprintf("read %x", key))
	return nil
}

func (s *noting) Scan(_ int, key []byte, keys int) error {
	s.asked = append(s.asked, fmt.Sprintf("scan %x: %d", key, keys))
	return nil
}

func TestEachActIsCarriedOut(t *testing.T) {
	ops := []op{{1, 11, actWrite}, {2, 12, actRead}, {3, 13, actReadWrite}, {4, 14, actInsert}, {5, 15, actScan}}
	store := &noting{}
	var want []string
	for number, op := range ops {
		if err := carryOut(store, 0, &task{KeyBytes: 8, Batch: 1}, ops, uint64(number)); err != nil {
			t.Error(err)
		}
		key := hex.EncodeToString(Key(op.key, 8))
		want = append(want, map[uint8][]string{
			actWrite:     {"write " + key + ": 11"},
			actRead:      {"read " + key},
			actReadWrite: {"read " + key, "write " + key + ": 13"},
			actInsert:    {"write " + key + ": 14"},
			actScan:      {"scan " + key + ": 15"},
		}[op.act]...)
	}
	if !slices.Equal(store.asked, want) {
		t.Errorf("%q, not %q", store.asked, want)
	}
}

type failing struct {
	idle
	begun time.Time
	err   error
}

// What is sent after 200 ms fails, and not before 500 ms.
func (s *failing) Write(int, []Pair) error {
	time.Sleep(time.Millisecond)
	since := time.Since(s.begun)
	if since < 200*time.Millisecond {
		return nil
	}
	time.Sleep(500*time.Millisecond - since)
	return s.err
}

func TestWhatFailsAfterTheMeasuredTimeCountsByWhenItBeganOrWasDue(t *testing.T) {
	refused := fmt.Errorf("%w: too busy", ErrRefused)
	unknown := errors.New("no answer in time")
	for _, err := range []error{refused, unknown} {
		for _, rate := range []float64{0, 1000} {
			store := &failing{begun: time.Now(), err: err}
			// The measured time ends 50 ms before the first fails.
			task := task{KeyBytes: 8, Batch: 1, Inflight: 4, Rate: rate, WarmUpMs: 50, MeasureMs: 400, DrainMs: 5000}
			result := measure(store, &task, writes)
			all, slow := recorded(result, 40)
			failed, other := result.Refused, result.Unfinished
			if err == unknown {
				failed, other = other, failed
			}
			if other != 0 {
				t.Errorf("%v at %v: %d of the other kind", err, rate, other)
			}
			// 250 were due after the first 200 ms; in the closed loop each worker waits with one.
			if rate == 0 && failed != 4 || rate > 0 && failed < 250 {
				t.Errorf("%v at %v: %d failed", err, rate, failed)
			}
			if err == unknown && slow < failed {
				t.Errorf("at %v only %d of %d are recorded with the time waited", rate, slow, failed)
			}
			if rate > 0 && (err == unknown && all != 400 || err == refused && all != 400-failed) {
				t.Errorf("%v at %v: %d recorded, %d failed", err, rate, all, failed)
			}
		}
	}
}

// A trace of one operation.
func traceOf(t *testing.T, op op) string {
	path := filepath.Join(t.TempDir(), "trace")
	bytes := binary.LittleEndian.AppendUint64(nil, op.key)
	bytes = binary.LittleEndian.AppendUint32(bytes, op.len)
	bytes = append(bytes, op.act, 0, 0, 0)
	if err := os.WriteFile(path, bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestATraceIsReadAsItIsWritten(t *testing.T) {
	for act := uint8(actWrite); act <= actScan; act++ {
		want := op{77, 100, act}
		ops, err := readTrace(traceOf(t, want))
		if err != nil || len(ops) != 1 || ops[0] != want {
			t.Errorf("%v, %v", ops, err)
		}
	}
	if _, err := readTrace(os.DevNull); err == nil {
		t.Error("an empty trace was accepted")
	}
	if _, err := readTrace(traceOf(t, op{77, 100, actScan + 1})); err == nil || !strings.Contains(err.Error(), "unknown act, 5") {
		t.Errorf("of an unknown act: %v", err)
	}
}

// A store without range scans.
type unordered struct{ idle }

func (s *unordered) Scan(int, []byte, int) error { return fmt.Errorf("range scans %w", ErrCannot) }

// With this set, the tests' program is a load generator.
const asPeer = "LOAD_TEST_PEER"

func TestMain(m *testing.M) {
	if os.Getenv(asPeer) != "" {
		Serve(&unordered{})
		os.Exit(0)
	}
	out.Encoder = json.NewEncoder(io.Discard)
	os.Exit(m.Run())
}

// Has another process do a task; answers the last line it says.
func told(t *testing.T, task string) (string, error) {
	peer := exec.Command(os.Args[0])
	peer.Env = append(os.Environ(), asPeer+"=1")
	peer.Stdin = strings.NewReader(task + "\n")
	said, err := peer.Output()
	lines := strings.Split(strings.TrimSpace(string(said)), "\n")
	return lines[len(lines)-1], err
}

func TestTheOtherSideIsToldTheResultOrWhyThereIsNone(t *testing.T) {
	measure := func(op op) string {
		return fmt.Sprintf(`{"do": "measure", "trace": %q, "key_bytes": 8, "batch": 1, "inflight": 1, "rate": 20,
			"warm_up_ms": 50, "measure_ms": 150, "drain_ms": 0}`, traceOf(t, op))
	}
	oneLine := strings.NewReplacer("\n", " ", "\t", "")
	line, err := told(t, oneLine.Replace(measure(op{1, 8, actRead})))
	var said map[string]map[string]any
	if err != nil || json.Unmarshal([]byte(line), &said) != nil {
		t.Fatalf("%s, %v", line, err)
	}
	fields := slices.Sorted(maps.Keys(said["result"]))
	if want := []string{"begun", "late_us", "latencies", "operations", "refused", "unfinished"}; !slices.Equal(fields, want) {
		t.Errorf("%q, not %q", fields, want)
	}
	line, err = told(t, oneLine.Replace(measure(op{1, 8, actScan})))
	if want := `{"error":"range scans cannot be done here"}`; err == nil || line != want {
		t.Errorf("%s, %v", line, err)
	}
}
