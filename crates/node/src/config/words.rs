//! Words of the configuration that stand for one of several things.

use anyhow::{Result, bail};
use cyclone_replica::{Engine, Polling, Security, Transport};

/// `rocksdb`, `memory` or `echo`.
pub fn parse_engine(text: &str) -> Result<Engine> {
    Ok(match text {
        "rocksdb" => Engine::RocksDb,
        "memory" => Engine::Memory,
        "echo" => Engine::Echo,
        other => bail!("engine {other:?} is unknown: expected \"rocksdb\", \"memory\" or \"echo\""),
    })
}

/// The same the other way round.
pub fn engine_name(engine: Engine) -> &'static str {
    match engine {
        Engine::RocksDb => "rocksdb",
        Engine::Memory => "memory",
        Engine::Echo => "echo",
    }
}

/// `udp`, `tcp`, `xdp` or `dpdk`.
pub fn parse_transport(text: &str) -> Result<Transport> {
    Ok(match text {
        "udp" => Transport::Udp,
        "tcp" => Transport::Tcp,
        "xdp" => Transport::Xdp,
        "dpdk" => Transport::Dpdk,
        other => {
            bail!("transport {other:?} is unknown: expected \"udp\", \"tcp\", \"xdp\" or \"dpdk\"")
        }
    })
}

/// `busy`, `adaptive` or `event`.
pub fn parse_polling(text: &str) -> Result<Polling> {
    Ok(match text {
        "busy" => Polling::Busy,
        "adaptive" => Polling::Adaptive,
        "event" => Polling::Event,
        other => {
            bail!("polling {other:?} is unknown: expected \"busy\", \"adaptive\" or \"event\"")
        }
    })
}

/// `authenticated`, `encrypted` or `off`.
pub fn parse_security(text: &str) -> Result<Security> {
    Ok(match text {
        "authenticated" => Security::Authenticated,
        "encrypted" => Security::Encrypted,
        "off" => Security::Off,
        other => bail!(
            "security {other:?} is unknown: expected \"authenticated\", \"encrypted\" or \"off\""
        ),
    })
}
