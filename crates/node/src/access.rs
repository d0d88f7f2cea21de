//! Warnings at start about who else has access: to files with keys and data, and to a Redis port
//! without authentication. Nothing is refused for it.

use std::path::Path;

use cyclone_gateway::GatewayConfig;
use cyclone_pmem::mode_open_to_others;

/// Warns of a file or directory that exists and is open to users besides its owner and group.
pub fn warn_if_open_to_others(what: &str, path: &Path) {
    if let Some(mode) = mode_open_to_others(path) {
        tracing::warn!(
            path = %path.display(),
            mode = format!("{mode:04o}"),
            "{what} is open to other users of this machine: chmod o-rwx"
        );
    }
}

/// Warns of a Redis port without authentication, and of passwords that cross the network in the
/// clear.
pub fn warn_of_redis_port(settings: &GatewayConfig) {
    if let Some(text) = redis_port_warning(settings) {
        tracing::warn!(listen = %settings.listen, "{text}");
    }
}

fn redis_port_warning(settings: &GatewayConfig) -> Option<&'static str> {
    if settings.listen.ip().to_canonical().is_loopback() {
        return None;
    }
    if settings.is_protected() {
        return Some(
            "protected mode: the Redis port asks for no password, user or client certificate, so only clients on the \
             loopback interface are served; set redis.users, node.password or redis.tls_client_authority, or \
             redis.protected_mode = false",
        );
    }
    if !settings.has_authentication() {
        return Some(
            "the Redis port asks for no password, user or client certificate, and \
             redis.protected_mode = false: any client that reaches it may read and write everything",
        );
    }
    let in_clear = settings.tls.is_none() && !settings.users.is_empty();
    in_clear.then_some("passwords cross the network in the clear: redis.tls_certificate is not set")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_redis_port_is_warned_of() {
        let warning = |listen: &str, change: fn(&mut GatewayConfig)| {
            let mut settings = GatewayConfig::new(listen.parse().expect("an address"));
            change(&mut settings);
            redis_port_warning(&settings)
        };
        for listen in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(warning(listen, |_| {}), None, "{listen}");
        }
        for listen in ["0.0.0.0:1", "192.0.2.1:1", "[::]:1"] {
            let text = warning(listen, |_| {}).expect("warned");
            assert!(text.starts_with("protected mode: "), "{text}");
            let text = warning(listen, |it| it.protected_mode = false).expect("warned");
            assert!(text.contains("may read and write everything"), "{text}");
            let password = |it: &mut GatewayConfig| it.passwords = vec![b"secret".to_vec()];
            assert_eq!(warning(listen, password), None, "{listen}");
        }
    }
}
