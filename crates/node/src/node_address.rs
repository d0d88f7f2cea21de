//! The node that a command connects to: `HOST:PORT` of its Redis port, where the host is an address
//! or a name. A name may have several addresses, and a command may be given several nodes: the
//! first that accepts a connection is taken.

use std::fmt;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// How long each address is tried where there are several.
const PATIENCE: Duration = Duration::from_secs(2);

/// `HOST:PORT` as the command line says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeAddress {
    host: String,
    port: u16,
}

impl FromStr for NodeAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<NodeAddress, String> {
        let expected = "expected HOST:PORT, such as 127.0.0.1:6379, [::1]:6379 or db1.example:6379";
        let (host, port) = text.rsplit_once(':').ok_or(expected)?;
        let port: u16 = port.parse().map_err(|_| expected)?;
        let inner = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let is_fit = match inner {
            Some(inner) => inner.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()),
            None => !host.is_empty() && !host.contains([':', '[', ']', '/', ' ']),
        };
        match is_fit && port != 0 {
            true => Ok(NodeAddress {
                host: inner.unwrap_or(host).to_owned(),
                port,
            }),
            false => Err(expected.to_owned()),
        }
    }
}

impl fmt::Display for NodeAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl NodeAddress {
    /// The host, if it is a name.
    fn name(&self) -> Option<&str> {
        let is_address = self.host.parse::<IpAddr>().is_ok();
        (!is_address).then_some(self.host.as_str())
    }

    /// All addresses of the host.
    ///
    /// # Errors
    /// A name that has none.
    fn resolve(&self) -> Result<Vec<SocketAddr>> {
        let found = (self.host.as_str(), self.port).to_socket_addrs();
        let found: Vec<SocketAddr> = found
            .with_context(|| format!("cannot resolve the host name {:?}", self.host))?
            .collect();
        if found.is_empty() {
            bail!("the host name {:?} has no address", self.host);
        }
        Ok(found)
    }
}

/// A node that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenNode {
    /// Where it is.
    pub address: SocketAddr,
    /// The name that it was given by, if it was.
    pub name: Option<String>,
}

/// Chooses the node to connect to. The only address there is is taken without a try.
///
/// # Errors
/// Every name that does not resolve and every address that accepts no connection, if there is no
/// other.
pub fn choose(nodes: &[NodeAddress]) -> Result<ChosenNode> {
    let (mut found, mut failures) = (Vec::new(), Vec::new());
    for node in nodes {
        match node.resolve() {
            Ok(addresses) => found.extend(addresses.into_iter().map(|address| ChosenNode {
                address,
                name: node.name().map(str::to_owned),
            })),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    if let ([only], true) = (found.as_slice(), failures.is_empty()) {
        return Ok(only.clone());
    }
    for chosen in found {
        match TcpStream::connect_timeout(&chosen.address, PATIENCE) {
            Ok(_) => return Ok(chosen),
            Err(error) => failures.push(format!("cannot connect to {}: {error}", chosen.address)),
        }
    }
    let given: Vec<String> = nodes.iter().map(NodeAddress::to_string).collect();
    bail!("--connect {}: {}", given.join(","), failures.join("; "))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    fn node(text: &str) -> NodeAddress {
        text.parse().expect(text)
    }

    #[test]
    fn host_and_port_are_read() {
        for (text, name) in [
            ("127.0.0.1:6379", None),
            ("[::1]:6379", None),
            ("localhost:6379", Some("localhost")),
            ("db-1.example:1", Some("db-1.example")),
        ] {
            assert_eq!(node(text).name(), name, "{text}");
            assert_eq!(node(text).to_string(), text);
        }
        for text in [
            "",
            "localhost",
            "localhost:",
            ":6379",
            "localhost:0",
            "localhost:65536",
            "::1:6379",
            "[localhost]:6379",
            "redis://localhost:6379",
        ] {
            let error = text.parse::<NodeAddress>().expect_err(text);
            assert!(error.starts_with("expected HOST:PORT"), "{text}: {error}");
        }
    }

    #[test]
    fn first_node_that_accepts_a_connection_is_chosen() {
        let listening = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listening.local_addr().expect("an address");
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let closed = other.local_addr().expect("an address");
        drop(other);
        // Where it has an address of either kind, only one is listened at.
        let named = node(&format!("localhost:{}", address.port()));
        let chosen = choose(std::slice::from_ref(&named)).expect("chosen");
        assert_eq!(chosen.address, address);
        assert_eq!(chosen.name.as_deref(), Some("localhost"));
        let unknown = node("no-such-host.invalid:6379");
        let nodes = [unknown.clone(), node(&closed.to_string()), named];
        assert_eq!(choose(&nodes).expect("chosen").address, address);
        // The only one is taken without a try.
        let alone = choose(&[node(&closed.to_string())]).expect("chosen");
        assert_eq!((alone.address, alone.name), (closed, None));
        let error = choose(&nodes[..2]).expect_err("none").to_string();
        for words in [
            "cannot resolve the host name \"no-such-host.invalid\"".to_owned(),
            format!("cannot connect to {closed}"),
        ] {
            assert!(error.contains(&words), "{words:?} is missing in: {error}");
        }
        let error = choose(&[unknown]).expect_err("no address").to_string();
        assert!(
            error.starts_with("--connect no-such-host.invalid:6379: "),
            "{error}"
        );
    }
}
