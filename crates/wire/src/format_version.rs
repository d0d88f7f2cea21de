//! Which formats a cluster writes (docs/formats.md, "Format version"; docs/adr/0088).
//!
//! A program reads every format up to [`FormatVersion::CURRENT`]. It writes what version 1 does not
//! have only where the version that the cluster has recorded allows the [`Feature`].

use std::fmt;

use crate::codec::{DecodeError, Reader, Write};

/// A version of all formats together: of entries, messages and files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FormatVersion(u32);

impl FormatVersion {
    /// The formats of release 0.1.0. A cluster that has recorded nothing is here.
    pub const V1: FormatVersion = FormatVersion(1);
    /// The cluster records its format version.
    pub const V2: FormatVersion = FormatVersion(2);
    /// The highest version that this program reads and writes.
    pub const CURRENT: FormatVersion = FormatVersion::V2;

    /// The version with this number, which may be higher than [`FormatVersion::CURRENT`]; `None`
    /// for 0, which is no version.
    pub const fn new(number: u32) -> Option<FormatVersion> {
        match number {
            0 => None,
            number => Some(FormatVersion(number)),
        }
    }

    /// Its number.
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Whether a cluster that has recorded this version may write what belongs to the feature.
    pub const fn allows(self, feature: Feature) -> bool {
        self.0 >= feature.since().0
    }

    /// Whether this program knows all formats of the version.
    ///
    /// # Errors
    /// It is higher than [`FormatVersion::CURRENT`].
    pub fn check_supported(self) -> Result<(), UnsupportedFormat> {
        match self <= FormatVersion::CURRENT {
            true => Ok(()),
            false => Err(UnsupportedFormat { recorded: self }),
        }
    }

    /// Appends the version.
    pub fn encode(self, out: &mut Vec<u8>) {
        out.put_u32(self.0);
    }

    /// Reads a version.
    ///
    /// # Errors
    /// Missing bytes, and 0.
    pub fn read(reader: &mut Reader<'_>) -> Result<FormatVersion, DecodeError> {
        FormatVersion::new(reader.u32()?).ok_or(DecodeError::OutOfRange {
            what: "format version",
            value: 0,
        })
    }

    /// Reads a version that takes up all of `bytes`.
    ///
    /// # Errors
    /// Anything that [`FormatVersion::encode`] would not write.
    pub fn decode(bytes: &[u8]) -> Result<FormatVersion, DecodeError> {
        let mut reader = Reader::new(bytes);
        let version = FormatVersion::read(&mut reader)?;
        reader.finish()?;
        Ok(version)
    }
}

impl fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A cluster has recorded a version that this program does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedFormat {
    /// The version recorded.
    pub recorded: FormatVersion,
}

impl fmt::Display for UnsupportedFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the cluster has recorded format version {}, and this program supports up to {}: nothing is lost, start the \
             newer program",
            self.recorded,
            FormatVersion::CURRENT
        )
    }
}

impl std::error::Error for UnsupportedFormat {}

/// What programs of an earlier format version do not read. A writer asks
/// [`FormatVersion::allows`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// The file `ENGINE` of a data directory names the recorded version.
    VersionInEngineFile,
}

impl Feature {
    /// The first version that has it.
    pub const fn since(self) -> FormatVersion {
        match self {
            Feature::VersionInEngineFile => FormatVersion::V2,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn features_are_allowed_from_their_version_on() {
        let feature = Feature::VersionInEngineFile;
        assert!(!FormatVersion::V1.allows(feature));
        assert!(FormatVersion::V2.allows(feature));
        assert!(FormatVersion::CURRENT.allows(feature));
    }

    #[test]
    fn a_newer_version_is_refused_with_both_versions() {
        assert_eq!(FormatVersion::CURRENT.check_supported(), Ok(()));
        let newer = FormatVersion(FormatVersion::CURRENT.0 + 1);
        let told = newer.check_supported().expect_err("newer").to_string();
        assert!(told.contains(&format!("format version {newer}")), "{told}");
        let supported = format!("up to {}", FormatVersion::CURRENT);
        assert!(told.contains(&supported), "{told}");
    }

    proptest! {
        #[test]
        fn versions_come_back(number in 1..=u32::MAX, bytes: [u8; 5], length in 0..6usize) {
            let version = FormatVersion(number);
            let mut out = Vec::new();
            version.encode(&mut out);
            prop_assert_eq!(FormatVersion::decode(&out), Ok(version));
            if let Ok(version) = FormatVersion::decode(&bytes[..length]) {
                prop_assert!(length == 4 && version.number() > 0);
            }
        }
    }
}
