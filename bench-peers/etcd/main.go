// Builds the etcd server at the version that go.mod pins: the peer of `cyclone bench put --peers`.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
