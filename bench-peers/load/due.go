package load

import (
	"runtime"
	"syscall"
	"time"
)

// Operations that may be due and not yet taken before the dispatcher has to check whether there is room again: more
// than workers take between two looks.
const ahead = 1 << 16

// handOut hands out the number of each operation that is due before `until` once it is due, and answers how many it handed out:
// all of them, unless there was no room until `last`. No other goroutine may send on the channel. The goroutine must then end, and its
// thread with it.
//
// Go's own timers are late by up to a millisecond, which would be charged to the system that is measured.
func handOut(numbers chan<- uint64, due func(uint64) time.Time, until, last time.Time) uint64 {
	// Never unlocked: no other goroutine should get a thread with such timers.
	runtime.LockOSThread()
	// If it cannot be had, sleeping is late by 50 µs more.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_TIMERSLACK, 1, 0)
	for number := uint64(0); ; number++ {
		at := due(number)
		if !at.Before(until) {
			return number
		}
		sleepUntil(at)
		// It does not wait at the channel: each operation that ends would have to wake this thread.
		for len(numbers) == cap(numbers) {
			now := time.Now()
			if !now.Before(last) {
				return number
			}
			sleepUntil(now.Add(time.Millisecond))
		}
		numbers <- number
	}
}

// To be called on a thread of one's own.
func sleepUntil(at time.Time) {
	for left := time.Until(at); left > 0; left = time.Until(at) {
		rest := syscall.NsecToTimespec(int64(left))
		// Go's signals end it early.
		_ = syscall.Nanosleep(&rest, nil)
	}
}
