//! For drivers of tests that stand around another.

/// What a driver around another, its first field, leaves as it is.
macro_rules! as_inner {
    () => {
        fn recv(
            &mut self,
            pool: &cyclone_pmem::pool::Pool,
            out: &mut Vec<(std::net::SocketAddr, cyclone_pmem::payload::Payload)>,
            max: usize,
        ) -> std::io::Result<usize> {
            self.0.recv(pool, out, max)
        }

        fn fds(&self) -> Vec<std::os::fd::RawFd> {
            self.0.fds()
        }

        fn max_datagram(&self) -> usize {
            self.0.max_datagram()
        }

        fn describe(&self) -> String {
            self.0.describe()
        }

        fn local_addr(&self) -> std::net::SocketAddr {
            self.0.local_addr()
        }

        fn stats(&self) -> cyclone_packet::DriverStats {
            self.0.stats()
        }
    };
}
pub(crate) use as_inner;
