// Decides histories of single keys with Porcupine, so that the project's own checker can be compared with it.
//
// Input: one history per line, a JSON array of operations {"op", "arg", "call", "return", "kind", "reply"}; values are
// strings, "return" is -1 for an operation whose outcome is unknown. Output: one line per history, "ok", "illegal" or
// "unknown" (time limit).
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Op     string `json:"op"`
	Arg    string `json:"arg"`
	Call   int64  `json:"call"`
	Return int64  `json:"return"`
	Kind   string `json:"kind"`
	Reply  string `json:"reply"`
}

// The state of a key: a value, or none.
type state struct {
	present bool
	value   string
}

// What an operation leaves behind and answers.
func apply(before state, op, arg string) (state, string, string) {
	old := func() (string, string) {
		if before.present {
			return "bytes", before.value
		}
		return "nil", ""
	}
	written := state{true, arg}
	switch op {
	case "get":
		kind, reply := old()
		return before, kind, reply
	case "len":
		return before, "int", strconv.Itoa(len(before.value))
	case "set":
		return written, "ok", ""
	case "set-absent":
		if before.present {
			return before, "nil", ""
		}
		return written, "ok", ""
	case "get-set":
		kind, reply := old()
		return written, kind, reply
	case "incr":
		number := int64(0)
		if before.present {
			parsed, err := strconv.ParseInt(before.value, 10, 64)
			if err != nil || strconv.FormatInt(parsed, 10) != before.value {
				return before, "refused", ""
			}
			number = parsed
		}
		delta, _ := strconv.ParseInt(arg, 10, 64)
		sum := strconv.FormatInt(number+delta, 10)
		return state{true, sum}, "int", sum
	case "append":
		whole := before.value + arg
		return state{true, whole}, "int", strconv.Itoa(len(whole))
	case "del":
		count := "0"
		if before.present {
			count = "1"
		}
		return state{}, "int", count
	case "get-del":
		kind, reply := old()
		return state{}, kind, reply
	}
	panic("unknown operation " + op)
}

func main() {
	model := porcupine.Model{
		Init: func() interface{} { return state{} },
		Step: func(before, input, output interface{}) (bool, interface{}) {
			asked := input.(operation)
			after, kind, reply := apply(before.(state), asked.Op, asked.Arg)
			if asked.Return < 0 {
				return true, after
			}
			return kind == asked.Kind && reply == asked.Reply, after
		},
	}
	limit := 200 * time.Millisecond
	scanner := bufio.NewScanner(os.Stdin)
	scanner.Buffer(nil, 1<<28)
	for scanner.Scan() {
		var operations []operation
		if err := json.Unmarshal(scanner.Bytes(), &operations); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		var history []porcupine.Operation
		for position, asked := range operations {
			end := asked.Return
			if end < 0 {
				// May take effect at any time: returns after everything else.
				end = 1 << 60
			}
			history = append(history, porcupine.Operation{
				ClientId: position, Input: asked, Call: asked.Call, Output: nil, Return: end,
			})
		}
		switch porcupine.CheckOperationsTimeout(model, history, limit) {
		case porcupine.Ok:
			fmt.Println("ok")
		case porcupine.Illegal:
			fmt.Println("illegal")
		default:
			fmt.Println("unknown")
		}
	}
}
