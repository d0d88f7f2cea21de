package load

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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

type stalling struct {
	begun time.Time
	calls atomic.Int64
}

// Nothing is answered between 150 and 250 ms.
func (s *stalling) Write(int, []Pair) error {
	s.calls.Add(1)
	since := time.Since(s.begun)
	if since > 150*time.Millisecond && since < 250*time.Millisecond {
		time.Sleep(250*time.Millisecond - since)
	}
	return nil
}

func (s *stalling) Read(int, []byte) error { return nil }

func TestAStallAppearsInTheTailOfTheOpenLoop(t *testing.T) {
	out.Encoder = json.NewEncoder(io.Discard)
	store := &stalling{begun: time.Now()}
	task := task{KeyBytes: 8, Batch: 1, Inflight: 4, Rate: 1000, WarmUpMs: 50, MeasureMs: 400, DrainMs: 5000}
	result := measure(store, &task, []op{{key: 1, len: 8, act: actWrite}})
	if result.Unfinished != 0 {
		t.Errorf("%d unfinished", result.Unfinished)
	}
	var all, slow uint64
	for _, bucket := range result.Latencies {
		all += bucket[1]
		if bucket[0] > 30_000_000 {
			slow += bucket[1]
		}
	}
	// 100 were due in the stall; those of its first 70 ms waited 30 ms and more, however late this machine is.
	if all != 400 || slow < 60 {
		t.Errorf("%d of %d operations were slow", slow, all)
	}
}

type failing struct {
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

func (s *failing) Read(int, []byte) error { return nil }

func TestWhatFailsAfterTheMeasuredTimeCountsByWhenItBeganOrWasDue(t *testing.T) {
	out.Encoder = json.NewEncoder(io.Discard)
	refused := fmt.Errorf("%w: too busy", ErrRefused)
	unknown := errors.New("no answer in time")
	for _, err := range []error{refused, unknown} {
		for _, rate := range []float64{0, 1000} {
			store := &failing{begun: time.Now(), err: err}
			// The measured time ends 50 ms before the first fails.
			task := task{KeyBytes: 8, Batch: 1, Inflight: 4, Rate: rate, WarmUpMs: 50, MeasureMs: 400, DrainMs: 5000}
			result := measure(store, &task, []op{{key: 1, len: 8, act: actWrite}})
			var all, slow uint64
			for _, bucket := range result.Latencies {
				all += bucket[1]
				if bucket[0] > 40_000_000 {
					slow += bucket[1]
				}
			}
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

func TestATraceIsReadAsItIsWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace")
	bytes := binary.LittleEndian.AppendUint64(nil, 77)
	bytes = binary.LittleEndian.AppendUint32(bytes, 100)
	bytes = append(bytes, actRead, 0, 0, 0)
	if err := os.WriteFile(path, bytes, 0o600); err != nil {
		t.Fatal(err)
	}
	ops, err := readTrace(path)
	if err != nil || len(ops) != 1 || ops[0] != (op{77, 100, actRead}) {
		t.Errorf("%v, %v", ops, err)
	}
	if _, err := readTrace(os.DevNull); err == nil {
		t.Error("an empty trace was accepted")
	}
}
