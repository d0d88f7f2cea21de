//! How to open the driver, as a text that fits the flag `--interface`.

use std::net::IpAddr;

use super::error::DpdkError;

/// What every Ethernet carries, bytes of an IP packet.
const USUAL_MTU: u16 = 1500;
const LEAST_MTU: u16 = 576;
const MOST_MTU: u16 = 16_000;
/// Left free by DPDK before each packet.
pub(super) const HEADROOM_BYTES: u32 = 128;
/// Ethernet header with a tag, and checksum.
const ETHERNET_BYTES: u32 = 22;
/// Room for a packet in a frame, at least.
const LEAST_ROOM: u32 = 2048;

/// How to open the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkOptions {
    /// The ports, as DPDK names them: PCI addresses (`0000:3b:00.0`), or virtual devices with their
    /// arguments (`net_memif0,role=client,socket=/run/cyclone.sock`).
    pub ports: Vec<String>,
    /// Our address, where the packet port's is unspecified (a client's).
    pub address: Option<IpAddr>,
    /// The way to destinations outside our own network: the router's address, and how many leading
    /// bits of ours make our network. `None`: all destinations are neighbours.
    pub gateway: Option<(IpAddr, u8)>,
    /// Largest IP packet, bytes.
    pub mtu: u16,
    /// Arguments for DPDK itself (EAL), between spaces; `None`: huge pages where there are any,
    /// else ordinary memory. The first driver of a process decides.
    pub eal: Option<String>,
    /// Queues of each port.
    pub queues: u32,
    /// Datagrams received at once, and sent with one call, at most.
    pub burst: usize,
}

fn bad(item: &str, why: &'static str) -> DpdkError {
    DpdkError::Options {
        item: item.to_owned(),
        why,
    }
}

impl DpdkOptions {
    /// Reads ports and settings between semicolons: `address=IP`, `gateway=IP/BITS`, `mtu=BYTES`,
    /// `eal=ARGUMENTS`; what is none of these is a port. One queue, bursts of 32.
    ///
    /// # Errors
    /// No port, or a setting that makes no sense.
    //= cyclone §4.2
    pub fn parse(text: &str) -> Result<DpdkOptions, DpdkError> {
        let mut options = DpdkOptions {
            ports: Vec::new(),
            address: None,
            gateway: None,
            mtu: USUAL_MTU,
            eal: None,
            queues: 1,
            burst: 32,
        };
        for item in text.split(';').map(str::trim).filter(|i| !i.is_empty()) {
            match item.split_once('=') {
                Some(("address", value)) => {
                    let ip = value.parse().map_err(|_| bad(item, "not an IP address"))?;
                    options.address = Some(ip);
                }
                Some(("gateway", value)) => options.gateway = Some(gateway(item, value)?),
                Some(("mtu", value)) => {
                    let mtu = value.parse().map_err(|_| bad(item, "not a number"))?;
                    if !(LEAST_MTU..=MOST_MTU).contains(&mtu) {
                        return Err(bad(item, "outside 576 to 16000"));
                    }
                    options.mtu = mtu;
                }
                Some(("eal", value)) => options.eal = Some(value.to_owned()),
                _ => options.ports.push(item.to_owned()),
            }
        }
        if options.ports.is_empty() {
            return Err(bad(text, "names no port"));
        }
        if options.ports.iter().any(|port| port.contains('\0')) {
            return Err(bad(text, "holds a zero byte"));
        }
        Ok(options)
    }

    /// The frame size that suits these ports: one packet in each frame.
    pub fn frame_bytes(&self) -> u32 {
        let packet = u32::from(self.mtu) + ETHERNET_BYTES;
        // Cards count in KiB what a buffer takes behind the headroom.
        packet.next_multiple_of(1024).max(LEAST_ROOM) + HEADROOM_BYTES
    }

    /// Bytes of the largest Ethernet packet, rounded up.
    pub(super) fn packet_bytes(&self) -> u32 {
        (u32::from(self.mtu) + ETHERNET_BYTES).next_multiple_of(64)
    }

    /// Rings to send by of so many drivers, at most.
    pub(super) fn send_rings(&self, drivers: u16) -> u32 {
        self.ports.len() as u32 * self.queues.max(1) * u32::from(drivers)
    }

    /// Whether this port is a PCI device.
    pub(super) fn is_pci(port: &str) -> bool {
        let name = port.split(',').next().unwrap_or_default();
        let digits = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
        name.contains(':') && name.contains('.') && name.chars().all(digits)
    }
}

fn gateway(item: &str, value: &str) -> Result<(IpAddr, u8), DpdkError> {
    let why = "not an address and bits, such as 10.0.0.254/24";
    let (ip, bits) = value.split_once('/').ok_or_else(|| bad(item, why))?;
    let ip: IpAddr = ip.parse().map_err(|_| bad(item, why))?;
    let bits: u8 = bits.parse().map_err(|_| bad(item, why))?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    if bits > most {
        return Err(bad(item, why));
    }
    Ok((ip, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_settings() {
        let options = DpdkOptions::parse(
            "net_memif0,role=client,socket=/run/a.sock ; 0000:3b:00.1;mtu=9000; address=10.77.0.4;gateway=10.77.0.254/24;\
             eal=--no-huge -m 300",
        )
        .unwrap();
        assert_eq!(
            options.ports,
            ["net_memif0,role=client,socket=/run/a.sock", "0000:3b:00.1"]
        );
        assert_eq!(options.address, Some([10, 77, 0, 4].into()));
        assert_eq!(options.gateway, Some(([10, 77, 0, 254].into(), 24)));
        assert_eq!(
            (options.mtu, options.eal.as_deref()),
            (9000, Some("--no-huge -m 300"))
        );
        assert_eq!(options.frame_bytes(), 9344);
        assert!(DpdkOptions::is_pci(&options.ports[1]) && !DpdkOptions::is_pci(&options.ports[0]));
        for (mtu, bytes) in [(576, 2176), (1500, 2176), (2026, 2176), (2027, 3200)] {
            let options = DpdkOptions::parse(&format!("a;mtu={mtu}")).unwrap();
            assert_eq!(options.frame_bytes(), bytes, "{mtu}");
            assert_eq!(bytes % 64, 0);
        }
    }

    #[test]
    fn refusals_name_the_item() {
        for text in [
            "",
            "mtu=1500",
            "a;mtu=9",
            "a;mtu=x",
            "a;gateway=10.0.0.1",
            "a;gateway=10.0.0.1/33",
            "a;address=here",
        ] {
            let error = DpdkOptions::parse(text).unwrap_err();
            assert!(
                matches!(error, DpdkError::Options { .. }),
                "{text}: {error}"
            );
        }
    }
}
