//! How far this replica has come, in the data directory's file `BOOTSTRAP` (docs/formats.md, "The
//! file BOOTSTRAP"). Without the file a replica is a full member: data directories of earlier
//! programs have none.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cyclone_wire::bootstrap::{Founder, Phase};

use crate::identity::replace_file;

/// The file's first line; other versions are refused.
const HEADING: &str = "cyclone bootstrap 1";

/// How far this replica has come. Each state is durable before anything is done that only it
/// allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Empty storage, formatted for a new cluster. It has not voted.
    New,
    /// It founds the cluster with these founders or not at all. It has not voted.
    Agreed(Vec<Founder>),
    /// A founder of a cluster with these founders.
    Founded(Vec<Founder>),
    /// It has lost storage.
    Recovering,
    /// A member that does not know the founders, or has recovered.
    Member,
    /// It has founded a cluster alone that had other members: its history is not the cluster's.
    Diverged,
}

impl State {
    pub(crate) fn phase(&self) -> Phase {
        match self {
            State::New => Phase::New,
            State::Agreed(_) => Phase::Agreed,
            State::Founded(_) => Phase::Founded,
            // To others it is the same: its word about what it has acknowledged counts for nothing.
            State::Recovering | State::Diverged => Phase::Recovering,
            State::Member => Phase::Member,
        }
    }

    /// The founders, where they are known.
    pub(crate) fn founders(&self) -> &[Founder] {
        match self {
            State::Agreed(founders) | State::Founded(founders) => founders,
            State::New | State::Recovering | State::Member | State::Diverged => &[],
        }
    }

    /// Whether it takes part in elections.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, State::Founded(_) | State::Member)
    }

    /// The text of the file.
    pub fn text(&self) -> String {
        let name = match self {
            State::New => "new",
            State::Agreed(_) => "agreed",
            State::Founded(_) => "founded",
            State::Recovering => "recovering",
            State::Member => "member",
            State::Diverged => "diverged",
        };
        let mut text = format!("{HEADING}\nstate {name}\n");
        for (id, incarnation) in self.founders() {
            // Writing to a string does not fail.
            let _ = writeln!(text, "founder {id:x} {incarnation:x}");
        }
        text
    }

    /// Reads the text of the file.
    ///
    /// # Errors
    /// The line, from 1, that [`State::text`] would not write.
    pub fn parse(text: &str) -> Result<State, usize> {
        let mut lines = text.lines();
        if lines.next() != Some(HEADING) {
            return Err(1);
        }
        let name = lines.next().and_then(|line| line.strip_prefix("state "));
        let mut founders = Vec::new();
        for (line, at) in lines.zip(3usize..) {
            let founder = line.strip_prefix("founder ").and_then(|rest| {
                let (id, incarnation) = rest.split_once(' ')?;
                let number = |digits| u64::from_str_radix(digits, 16).ok();
                Some((number(id)?, number(incarnation)?))
            });
            founders.push(founder.ok_or(at)?);
        }
        match (name, founders.is_empty()) {
            (Some("agreed"), false) => Ok(State::Agreed(founders)),
            (Some("founded"), false) => Ok(State::Founded(founders)),
            (Some("new"), true) => Ok(State::New),
            (Some("recovering"), true) => Ok(State::Recovering),
            (Some("member"), true) => Ok(State::Member),
            (Some("diverged"), true) => Ok(State::Diverged),
            _ => Err(2),
        }
    }
}

/// Where the state is kept.
pub trait StateFile: Send {
    /// The text that was written last, if any was.
    ///
    /// # Errors
    /// What the file system says.
    fn read(&self) -> io::Result<Option<String>>;

    /// Makes a text durable in place of the one before.
    ///
    /// # Errors
    /// What the file system says.
    fn write(&mut self, text: &str) -> io::Result<()>;
}

/// The file in a data directory.
pub struct DataFile {
    data: PathBuf,
}

impl DataFile {
    /// The file of this data directory, which need not exist.
    pub fn new(data: &Path) -> DataFile {
        DataFile {
            data: data.to_owned(),
        }
    }

    fn path(&self) -> PathBuf {
        self.data.join("BOOTSTRAP")
    }
}

impl StateFile for DataFile {
    fn read(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(self.path()) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        replace_file(&self.path(), text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_come_back_and_others_are_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut file = DataFile::new(directory.path());
        assert_eq!(file.read().expect("no file is no error"), None);
        let founders = vec![(1, 0xabc), (u64::MAX, 0)];
        for state in [
            State::New,
            State::Agreed(founders.clone()),
            State::Founded(founders),
            State::Recovering,
            State::Member,
        ] {
            file.write(&state.text()).expect("written");
            let text = file.read().expect("read").expect("there");
            assert_eq!(State::parse(&text), Ok(state));
        }
        for (text, line) in [
            ("", 1),
            ("cyclone bootstrap 2\nstate new\n", 1),
            ("cyclone bootstrap 1\n", 2),
            ("cyclone bootstrap 1\nstate founded\n", 2),
            ("cyclone bootstrap 1\nstate new\nfounder 1 2\n", 2),
            ("cyclone bootstrap 1\nstate agreed\nfounder 1\n", 3),
        ] {
            assert_eq!(State::parse(text), Err(line), "{text:?}");
        }
    }
}
