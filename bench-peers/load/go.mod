module cyclone/bench-peers/load

go 1.25.0
