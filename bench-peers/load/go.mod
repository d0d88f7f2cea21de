module cyclone/bench-peers/load

go 1.24.0
