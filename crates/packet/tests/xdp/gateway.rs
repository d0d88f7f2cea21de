//! A peer beyond a router: headers go to the gateway's Ethernet address.

use super::*;

fn allow(machine: &Machine, what: &str) {
    machine.enter();
    // The files of this thread's namespace.
    std::fs::write(format!("/proc/sys/net/{what}"), "1").expect("a setting of the namespace");
}

fn talk_by_the_gateway(at: &str, peer: &str) {
    let (Some(a), Some(router), Some(b)) = (Machine::new(), Machine::new(), Machine::new()) else {
        return;
    };
    for (machine, name, other, net, number) in [(&a, "va", "ra", 1, 1), (&b, "vb", "rb", 2, 2)] {
        machine.ip(&format!(
            "link add {name} type veth peer name {other} netns {}",
            router.path()
        ));
        for (machine, name, number) in [(machine, name, number), (&router, other, 9)] {
            machine.ip(&format!("addr add 10.77.{net}.{number}/24 dev {name}"));
            machine.ip(&format!(
                "addr add fd77:{net}::{number}/64 dev {name} nodad"
            ));
            machine.ip(&format!("link set {name} up"));
        }
        machine.ip(&format!("route add default via 10.77.{net}.9"));
        machine.ip(&format!("-6 route add default via fd77:{net}::9"));
    }
    allow(&router, "ipv4/ip_forward");
    allow(&router, "ipv6/conf/all/forwarding");
    let clock = Clock(Instant::now());
    let (pool_a, pool_b) = (pool(4096, 2048), pool(4096, 2048));
    a.enter();
    let driver = Box::new(xdp(at, "va", &pool_a));
    let mut at_a = end(&a, driver, pool_a, 1);
    b.enter();
    let driver = Box::new(xdp(peer, "vb", &pool_b));
    let mut at_b = end(&b, driver, pool_b, 2);
    at_a.port.add_node(2, peer.parse().unwrap());
    at_b.port.add_node(1, at.parse().unwrap());
    settle(&clock, &mut at_a, &mut at_b);
    let before = (at_a.port.driver_stats(), at_b.port.driver_stats());
    let bodies: Vec<Vec<u8>> = [1, 255, 1400, 9000, 65_000, 200_000]
        .map(|len| body(len as u64, len))
        .into();
    exchange(&clock, &mut at_a, &mut at_b, 2, &bodies);
    exchange(&clock, &mut at_b, &mut at_a, 1, &bodies);
    for (End { port, pool, .. }, before) in [(at_a, before.0), (at_b, before.1)] {
        let stats = port.driver_stats();
        let by_kernel = stats.by_kernel - before.by_kernel;
        let moved = stats.received + stats.sent - before.received - before.sent;
        assert!(
            by_kernel * 10 < moved,
            "{by_kernel} of {moved} by the kernel"
        );
        assert_eq!(stats.malformed + stats.truncated, 0, "{stats:?}");
        drop(port);
        assert_eq!(pool.free(), pool.count());
    }
}

#[test]
fn by_a_gateway_over_ipv4() {
    talk_by_the_gateway("10.77.1.1:7101", "10.77.2.2:7102");
}

#[test]
fn by_a_gateway_over_ipv6() {
    talk_by_the_gateway("[fd77:1::1]:7101", "[fd77:2::2]:7102");
}
