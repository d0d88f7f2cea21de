//! Servers that come back with nothing.

use cyclone_pmkv::ServerId;

use super::World;

impl World {
    /// A server comes back with an empty memory, and becomes a backup of what it has joined.
    pub fn rejoin(&mut self, n: ServerId) {
        self.begin_rejoin(n);
        self.finish_rejoin(n);
    }

    /// A server comes back with an empty memory, and receives writes from now on.
    pub fn begin_rejoin(&mut self, n: ServerId) {
        let memory = self.fabric.memory(&format!("s{n}"));
        memory.zero(0, memory.len());
        memory.persist(0, memory.len());
        self.hosts[n as usize].voids.clear();
        self.start(n, false);
        let server = self.server(n);
        self.configuration = self.configuration.with(server, self.plan.copies);
        self.reconfigure();
    }

    /// Requests go on until the server has everything of what it joins; then it is a backup.
    pub fn finish_rejoin(&mut self, n: ServerId) {
        let joins = self.joins_of(n);
        for _ in 0..400 {
            if self.node(n).joined() == joins {
                break;
            }
            self.run(100);
            self.fabric.run_for(10_000);
        }
        assert_eq!(self.node(n).joined(), joins, "seed {}", self.seed);
        self.configuration = self.configuration.joined(n, &joins);
        self.reconfigure();
    }

    /// The shards that a server joins.
    pub fn joins_of(&self, n: ServerId) -> Vec<u16> {
        let joins = self.configuration.shards.iter().zip(0u16..);
        let joins = joins.filter(|(it, _)| it.joining.contains(&n));
        joins.map(|it| it.1).collect()
    }
}
