//! Which kernel this is.

/// Its version, major and minor, if it says one.
pub(super) fn running() -> Option<(u32, u32)> {
    parse(&std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
}

/// The numbers that a release's name begins with.
fn parse(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let end = rest.find(|c: char| !c.is_ascii_digit());
    let minor = &rest[..end.unwrap_or(rest.len())];
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Whether sockets of one queue may share its fill ring where the program runs in the network
/// stack. Before Linux 6.15 the kernel guards that ring by a lock of each socket, so two CPUs may
/// take the same frame.
pub(super) fn shares_in_stack(version: Option<(u32, u32)>) -> bool {
    version.is_some_and(|version| version >= (6, 15))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        for (text, version) in [
            ("6.18.44-fc-v657", Some((6, 18))),
            ("5.11", Some((5, 11))),
            ("6.1.0-13-amd64", Some((6, 1))),
            ("6.15-rc3", Some((6, 15))),
            ("10.0.1", Some((10, 0))),
            ("6", None),
            ("", None),
            ("six.one", None),
            ("6.x", None),
        ] {
            assert_eq!(parse(text), version, "{text:?}");
        }
        assert!(running().is_some());
    }

    #[test]
    fn old_kernels_do_not_share_in_the_stack() {
        for (version, shares) in [
            (None, false),
            (Some((5, 19)), false),
            (Some((6, 6)), false),
            (Some((6, 14)), false),
            (Some((6, 15)), true),
            (Some((6, 18)), true),
            (Some((7, 0)), true),
        ] {
            assert_eq!(shares_in_stack(version), shares, "{version:?}");
        }
    }
}
