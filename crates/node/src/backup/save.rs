//! `cyclone ctl snapshot save`: fetches a snapshot from the leader and writes it to a file.

use std::io::{BufWriter, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use redis::{Connection, Value};

use cyclone_wire::ring::crc32c_of;

use super::format::{Head, Packer};
use crate::ctl;
use crate::resp::{self, Access};
use crate::signals::Draft;

/// Bytes asked for at a time.
const PIECE_BYTES: u64 = 1 << 20;
/// How long a node may take to make the snapshot, and for each piece.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a leader is looked for.
const SEARCH: Duration = Duration::from_secs(10);

/// What the command line says.
pub struct Arguments {
    /// A node.
    pub connect: SocketAddr,
    /// How to get in.
    pub access: Access,
    /// Where to write.
    pub file: PathBuf,
    /// Most MiB per second, so that the node's clients do not notice.
    pub mib_per_second: Option<u64>,
    /// JSON instead of text.
    pub json: bool,
}

/// What the node says about the snapshot it has made.
struct Begun {
    id: i64,
    head: Head,
    files: Vec<(String, u64)>,
}

/// Saves everything that was acknowledged before this is called, and perhaps what is acknowledged
/// meanwhile: of all logs the same moment.
///
/// # Errors
/// No leader; a file that is there already; a node or a disk that fails. Then there is no file.
pub fn run(arguments: &Arguments) -> Result<()> {
    if arguments.file.exists() {
        bail!(
            "{} is there already; choose another name",
            arguments.file.display()
        );
    }
    ctl::refuse_pmkv(arguments.connect, &arguments.access, "`ctl snapshot`")?;
    let mut connection = leader(arguments.connect, &arguments.access)?;
    let begun = begin(&mut connection).map_err(|error| interrupted(error, arguments.connect))?;
    let mut draft = arguments.file.clone().into_os_string();
    draft.push(".part");
    let draft = PathBuf::from(draft);
    // Removes it where this does not come to its end.
    let guard = Draft::new(draft.clone())?;
    let fetched = fetch(&mut connection, &begun, &draft, arguments.mib_per_second)
        .map_err(|error| interrupted(error, arguments.connect));
    // The node releases it in any case when the connection closes.
    let _ = snapshot()
        .arg("END")
        .arg(begun.id)
        .query::<()>(&mut connection);
    let bytes = fetched?;
    let placed = place(&draft, &arguments.file);
    // A whole snapshot is kept, under whatever name.
    guard.keep();
    placed.with_context(|| format!("the snapshot is whole, in {}", draft.display()))?;
    super::print(&begun.head, None, arguments.json);
    if !arguments.json {
        println!("bytes     {bytes}");
    }
    Ok(())
}

/// What to do about a connection that has ended, or a node that has stopped, in the middle.
fn interrupted(error: anyhow::Error, connect: SocketAddr) -> anyhow::Error {
    let cause = error.downcast_ref::<redis::RedisError>();
    let Some(cause) = cause.filter(|it| it.is_io_error() || it.is_connection_dropped()) else {
        return error;
    };
    let why = match cause.is_timeout() {
        true => format!("the node did not answer within {PATIENCE:?}"),
        false => {
            "the connection to the leader ended: the node has stopped, or closed it".to_owned()
        }
    };
    error.context(format!(
        "{why}. Nothing was saved. Give the command again, with --connect {connect} or another node: it begins anew, with \
         whichever node leads by then"
    ))
}

/// Gives the whole file its name; one that is there is not replaced.
fn place(draft: &Path, file: &Path) -> Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, draft, CWD, file, RenameFlags::NOREPLACE) {
        // File systems over the network do not know the flag; a second link is not made over a file
        // either.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
            std::fs::hard_link(draft, file).and_then(|()| std::fs::remove_file(draft))
        }
        renamed => renamed.map_err(Into::into),
    }
    .with_context(|| format!("cannot name it {}", file.display()))?;
    let directory = match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    std::fs::File::open(directory)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("cannot sync {}", directory.display()))
}

/// A connection to the node that leads, after a read that it could answer only if it really does.
fn leader(connect: SocketAddr, access: &Access) -> Result<Connection> {
    let until = Instant::now() + SEARCH;
    loop {
        let mut last = None;
        for address in ctl::addresses(connect, access)? {
            let attempt = || -> Result<Option<Connection>> {
                let mut connection = resp::connect_with(address, access, Duration::from_secs(2))?;
                if resp::info_of(&mut connection)?
                    .get("cyclone_role")
                    .map(String::as_str)
                    != Some("leader")
                {
                    return Ok(None);
                }
                redis::cmd("CLIENT")
                    .arg("READMODE")
                    .arg("INDEX")
                    .query::<()>(&mut connection)?;
                // Of all logs, and of few keys: to count them takes longer than anybody waits here.
                redis::cmd("SCAN")
                    .arg(0)
                    .arg("COUNT")
                    .arg(1)
                    .query::<Value>(&mut connection)?;
                connection.set_read_timeout(Some(PATIENCE))?;
                Ok(Some(connection))
            };
            match attempt() {
                Ok(Some(connection)) => return Ok(connection),
                Ok(None) => {}
                Err(error) => last = Some(error),
            }
        }
        if Instant::now() > until {
            let error = last.unwrap_or_else(|| anyhow::anyhow!("no node says that it leads"));
            return Err(error.context(format!("no leader within {SEARCH:?}")));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn snapshot() -> redis::Cmd {
    let mut command = redis::cmd("CYCLONE");
    command.arg("SNAPSHOT");
    command
}

fn begin(connection: &mut Connection) -> Result<Begun> {
    let answer: Value = snapshot()
        .arg("BEGIN")
        .query(connection)
        .context("the node makes no snapshot")?;
    read_begun(&answer).context("the node's description of the snapshot does not read")
}

fn pair(value: &Value) -> Option<(&Value, u64)> {
    match value {
        Value::Array(pair) => match &pair[..] {
            // Lengths and terms are never negative.
            [first, Value::Int(second)] => Some((first, u64::try_from(*second).ok()?)),
            _ => None,
        },
        _ => None,
    }
}

fn pairs(value: &Value) -> Option<Vec<(&Value, u64)>> {
    let Value::Array(items) = value else {
        return None;
    };
    items.iter().map(pair).collect()
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn read_begun(answer: &Value) -> Result<Begun> {
    let wrong = "not as expected";
    let Value::Array(items) = answer else {
        bail!(wrong);
    };
    let [Value::Int(id), cluster, engine, applied, files] = &items[..] else {
        bail!(wrong);
    };
    let applied: Vec<(u64, u64)> = pairs(applied)
        .context(wrong)?
        .into_iter()
        .map(|(index, term)| match index {
            Value::Int(index) => Ok((*index as u64, term)),
            _ => bail!(wrong),
        })
        .collect::<Result<_>>()?;
    let files: Vec<(String, u64)> = pairs(files)
        .context(wrong)?
        .into_iter()
        .map(|(name, length)| Ok((text(name).context(wrong)?.to_owned(), length)))
        .collect::<Result<_>>()?;
    let random = crate::cluster::random_key()?;
    let mut own = [0; 16];
    own.copy_from_slice(&random[..16]);
    let made = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let head = Head {
        id: u128::from_le_bytes(own),
        cluster: u128::from_str_radix(text(cluster).context(wrong)?, 16)?,
        made_ms: made.as_millis() as u64,
        engine: Head::engine(text(engine).context(wrong)?)?,
        applied,
        files: u32::try_from(files.len())?,
    };
    Ok(Begun {
        id: *id,
        head,
        files,
    })
}

/// Writes everything to `draft` and syncs it; answers its length.
fn fetch(
    connection: &mut Connection,
    begun: &Begun,
    draft: &Path,
    mib_per_second: Option<u64>,
) -> Result<u64> {
    let cannot = || format!("cannot write {}", draft.display());
    let mut new = cyclone_pmem::private_file();
    new.write(true).create(true).truncate(true);
    let file = new.open(draft).with_context(cannot)?;
    let mut packer = Packer::new(BufWriter::with_capacity(1 << 20, file), &begun.head)?;
    let started = Instant::now();
    let mut fetched = 0;
    for (number, (name, length)) in begun.files.iter().enumerate() {
        packer.begin_file(name, *length).with_context(cannot)?;
        let mut offset = 0;
        while offset < *length {
            let count = PIECE_BYTES.min(length - offset);
            let piece = piece(connection, begun.id, number, offset, count)
                .with_context(|| format!("{name} from {offset} on"))?;
            packer.piece(&piece).with_context(cannot)?;
            offset += count;
            fetched += count;
            if let Some(rate) = mib_per_second {
                std::thread::sleep(due(fetched, rate).saturating_sub(started.elapsed()));
            }
        }
        packer.end_file().with_context(cannot)?;
    }
    let (mut out, bytes) = packer.finish().with_context(cannot)?;
    out.flush().with_context(cannot)?;
    out.get_ref().sync_all().with_context(cannot)?;
    Ok(bytes)
}

/// When so many bytes may have been fetched, from the beginning on.
fn due(fetched: u64, mib_per_second: u64) -> Duration {
    let bytes_per_second = mib_per_second.max(1).saturating_mul(1 << 20);
    Duration::from_secs_f64(fetched as f64 / bytes_per_second as f64)
}

fn piece(
    connection: &mut Connection,
    id: i64,
    file: usize,
    offset: u64,
    count: u64,
) -> Result<Vec<u8>> {
    let (sum, bytes): (u32, Vec<u8>) = snapshot()
        .arg("READ")
        .arg(id)
        .arg(file)
        .arg(offset)
        .arg(count)
        .query(connection)?;
    if bytes.len() as u64 != count || crc32c_of(&bytes) != sum {
        bail!("a piece was damaged on its way");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_rate_is_kept() {
        assert_eq!(due(6 << 20, 3), Duration::from_secs(2));
        assert_eq!(due(1 << 20, 0), Duration::from_secs(1));
        for rate in [1 << 44, u64::MAX] {
            assert!(due(1 << 20, rate) < Duration::from_millis(1), "{rate}");
        }
    }
}
