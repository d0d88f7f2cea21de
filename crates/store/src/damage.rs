//! What of a store does not read back.

/// What a store has lost for good because bytes of its files do not read back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreDamage {
    /// The damaged files.
    pub files: Vec<DamagedFile>,
    /// Most keys that are lost: entries of the damaged blocks, and keys of other blocks whose last
    /// value a damaged block may hold. `None`: the number of a file's entries does not read.
    pub keys: Option<u64>,
    /// Most keys that are lost because an entry of the log changed them by what a lost key held.
    pub dependent_keys: u64,
    /// Records of sessions are lost: which commands of native clients are executed is not known.
    pub has_lost_sessions: bool,
}

/// A file with damaged blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedFile {
    /// Its name within the store's directory.
    pub name: String,
    /// Damaged blocks; 0: no block of the file is found.
    pub blocks: u64,
    /// Keys and deletions that those hold, if that is known.
    pub entries: Option<u64>,
    /// What is wrong with the first.
    pub what: String,
}
