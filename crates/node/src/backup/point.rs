//! A point in time after a snapshot: where the archive leads to, and its name. Nodes that are
//! brought to different moments must not take each other for the same cluster, so the name that
//! goes into their configuration is made of the snapshot and the places.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use cyclone_replica::archive::{ArchiveDir, Place, ReplayEnd, ReplayError, Until, replay};
use cyclone_store::StateMachine;
use sha2::{Digest as _, Sha256};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::format::Head;

/// What is wanted.
pub struct Wanted {
    directories: Vec<PathBuf>,
    until: Until,
}

/// Where it is.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// Takes the snapshot's place in `cluster.restored_from`.
    pub id: u128,
    reached: ReplayEnd,
    /// What was asked for, if a time.
    until_ms: Option<u64>,
}

impl Wanted {
    /// What the command line says; `None` without directories.
    ///
    /// # Errors
    /// A time or place that is none.
    pub fn read(
        directories: Vec<PathBuf>,
        until: Option<&str>,
        until_index: Option<&str>,
    ) -> Result<Option<Wanted>> {
        if directories.is_empty() {
            return Ok(None);
        }
        let until = match (until, until_index) {
            (Some(time), _) => Until::Time(parse_time(time)?),
            (None, Some(place)) => {
                let wrong = || format!("--until-index {place:?} is not LOG:INDEX");
                let (log, index) = place.split_once(':').with_context(wrong)?;
                Until::Index(
                    log.parse().with_context(wrong)?,
                    index.parse().with_context(wrong)?,
                )
            }
            (None, None) => Until::End,
        };
        Ok(Some(Wanted { directories, until }))
    }

    fn shelf(&self, head: &Head) -> Result<ArchiveDir> {
        let shelf = ArchiveDir::open(&self.directories, head.cluster)?;
        if shelf.is_empty() {
            bail!(
                "no archive file of cluster {:032x}, of which the snapshot is, lies in {}; node.archive of that cluster's nodes \
                 says where they are",
                head.cluster,
                self.directories
                    .iter()
                    .map(|directory| directory.display().to_string())
                    .collect::<Vec<_>>()
                    .join(", ")
            );
        }
        Ok(shelf)
    }

    /// Looks where the archive leads to, without a store.
    ///
    /// # Errors
    /// What is damaged or missing on the way.
    pub fn find(&self, head: &Head) -> Result<Found> {
        let reached = match replay(&self.shelf(head)?, &head.applied, self.until, None) {
            Err(ReplayError::SnapshotLater { clock_ms, .. }) if clock_ms > 0 => bail!(
                "the snapshot holds what was written until {}, which is later than that moment: begin with an earlier snapshot",
                format_time(clock_ms)
            ),
            Err(ReplayError::ClockBack {
                log,
                cut,
                cut_ms,
                index,
                stamp_ms,
                last,
            }) => bail!(
                "log {log} would end before entry {cut}, stamped {}, but entry {index}, which comes later, is stamped {}. Either a \
                 leader's clock was ahead: then what was written up to entry {last} belongs to that moment, so say \
                 --until-index {log}:{last}. Or it was behind afterwards: then say --until-index {log}:{}. \
                 The other logs go as far as that entry's own stamp",
                format_time(cut_ms),
                format_time(stamp_ms),
                cut - 1
            ),
            other => other?,
        };
        Ok(Found {
            id: name(head.id, &reached.places),
            reached,
            until_ms: match self.until {
                Until::Time(ms) => Some(ms),
                _ => None,
            },
        })
    }

    /// Brings a store that holds the snapshot there.
    ///
    /// # Errors
    /// As [`Wanted::find`]; the store's; an archive that has changed since.
    pub fn apply(&self, head: &Head, found: &Found, store: &dyn StateMachine) -> Result<()> {
        // The archive may have grown since it was read; what was found is what counts.
        let shelf = self.shelf(head)?;
        let reached = replay(&shelf, &head.applied, self.until, Some(store))?;
        ensure!(
            reached
                .places
                .iter()
                .map(|place| (place.index, place.term))
                .eq(found
                    .reached
                    .places
                    .iter()
                    .map(|place| (place.index, place.term))),
            "the archive has grown while it was read: copy it, or say --until"
        );
        for (log, place) in (0_u16..).zip(&reached.places) {
            let has = store.applied(log);
            ensure!(
                has == (place.index, place.term),
                "log {log} of the store is at {has:?}, not at {:?}",
                (place.index, place.term)
            );
        }
        store.flush()?;
        Ok(())
    }
}

/// The name of a point in time.
fn name(snapshot: u128, places: &[Place]) -> u128 {
    let mut sum = Sha256::new();
    sum.update(b"cyclone moment after a snapshot ");
    sum.update(snapshot.to_le_bytes());
    for place in places {
        sum.update(place.index.to_le_bytes());
        sum.update(place.term.to_le_bytes());
    }
    let mut first = [0; 16];
    first.copy_from_slice(&sum.finalize()[..16]);
    u128::from_le_bytes(first)
}

impl Found {
    pub(super) fn json(&self) -> serde_json::Value {
        let places = self.reached.places.iter();
        let logs: Vec<_> = places
            .map(|place| {
                serde_json::json!({
                    "applied": place.index,
                    "term": place.term,
                    "stamp_ms": place.clock_ms,
                    "archive_ended": place.at_end,
                    "held_back": place.held,
                    "left_out": place.left_out.map(|left| serde_json::json!({
                        "index": left.index,
                        "stamp_ms": left.stamp_ms,
                    })),
                    "unseen": place.unseen,
                })
            })
            .collect();
        serde_json::json!({
            "restored_from": format!("{:032x}", self.id),
            "entries": self.reached.entries,
            "logs": logs,
        })
    }

    pub(super) fn print(&self) {
        println!("with {} archived entries:", self.reached.entries);
        for (log, place) in self.reached.places.iter().enumerate() {
            print!("log {log:<5} applied {}, term {}", place.index, place.term);
            if place.clock_ms > 0 {
                print!(", latest stamp {}", format_time(place.clock_ms));
            }
            if place.held > 0 {
                print!(
                    "; {} entries behind it belong to, or follow, an operation over several logs that is not whole there",
                    place.held
                );
            }
            println!();
            if let Some(left) = place.left_out {
                let stamp = left.stamp_ms.map_or("without a stamp".to_owned(), |ms| {
                    format!("stamped {}", format_time(ms))
                });
                println!("          left out from entry {} on, {stamp}", left.index);
            }
            if place.unseen > 0 {
                println!(
                    "          {} later entries are damaged or missing in the archive, so it is not known whether a clock had been ahead",
                    place.unseen
                );
            }
            if place.at_end && self.until_ms.is_some() {
                println!(
                    "          the archive ends there: later entries before that moment, if there were any, are not in it"
                );
            }
        }
        println!(
            "restored_from = \"{:032x}\"    into [cluster] on every node of the new cluster",
            self.id
        );
    }
}

/// Milliseconds since 1970 of an RFC 3339 time, or the milliseconds themselves.
fn parse_time(text: &str) -> Result<u64> {
    if let Ok(ms) = text.parse::<u64>() {
        return Ok(ms);
    }
    parse_date(text).with_context(|| {
        format!("--until {text:?}: expected a time like 2026-11-21T23:30:00Z or 2026-11-21T23:30:00.250+01:00, or milliseconds since 1970")
    })
}

/// Milliseconds since 1970 of an RFC 3339 time.
pub fn parse_date(text: &str) -> Option<u64> {
    let moment = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    u64::try_from(moment.unix_timestamp_nanos().div_euclid(1_000_000)).ok()
}

/// The milliseconds themselves if the calendar does not reach so far.
fn format_time(ms: u64) -> String {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000)
        .ok()
        .and_then(|moment| moment.format(&Rfc3339).ok())
        .unwrap_or_else(|| ms.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use cyclone_wire::archive::{self, End, EntryHead, put_entry, seal_entry};
    use cyclone_wire::batch;

    use super::*;

    /// An archive of one log, whose entries have these stamps.
    fn archive(directory: &Path, stamps: &[u64]) {
        let head = archive::Head {
            log: 0,
            logs: 1,
            cluster: 7,
            replica: 1,
            first: 1,
            prev_term: 0,
            gap_from: 0,
            clock_ms: 0,
            begun_ms: 0,
        };
        let mut file = head.encode();
        let seed = u32::from_le_bytes(*file.last_chunk().expect("a checksum"));
        for (index, stamp_ms) in (1..).zip(stamps) {
            let payload = batch::Writer::new().finish(*stamp_ms);
            let mut entry = Vec::new();
            let head = EntryHead {
                length: payload.len() as u32,
                index,
                term: 1,
                kind: 0,
            };
            put_entry(&mut entry, &head);
            entry.extend_from_slice(&payload);
            seal_entry(seed, &mut entry);
            file.extend_from_slice(&entry);
        }
        let last = stamps.len() as u64;
        let end = End {
            last,
            last_term: 1,
            entries: last,
            bytes: file.len() as u64,
            clock_ms: stamps.iter().copied().max().unwrap_or(0),
        };
        file.extend_from_slice(&end.encode(seed));
        let name = format!("{:032x}.00.{:020}.{last:020}.1.cyarch", 7, 1);
        std::fs::write(directory.join(name), file).expect("written");
    }

    /// A leader's clock was a day ahead for a while: a cut by time would leave out everything that
    /// was acknowledged since.
    #[test]
    fn a_time_that_a_clock_hides_is_refused_with_the_alternative() {
        let directory = tempfile::tempdir().expect("directory");
        archive(
            directory.path(),
            &[1_000_000, 90_000_000, 1_100_000, 1_200_000],
        );
        let head = Head {
            id: 5,
            cluster: 7,
            made_ms: 0,
            engine: "memory",
            applied: vec![(0, 0)],
            files: 0,
        };
        let find = |until: Option<&str>, index: Option<&str>| {
            let directories = vec![directory.path().to_owned()];
            let wanted = Wanted::read(directories, until, index).expect("read");
            wanted.expect("directories").find(&head)
        };
        let error = find(Some("1150000"), None).expect_err("hidden").to_string();
        for word in [
            "log 0 would end before entry 2",
            "stamped 1970-01-02T01:00:00Z",
            "entry 3",
            "stamped 1970-01-01T00:18:20Z",
            "--until-index 0:3",
            "--until-index 0:1",
        ] {
            assert!(error.contains(word), "{word}: {error}");
        }
        let found = find(None, Some("0:3")).expect("found").json();
        assert_eq!(found["logs"][0]["applied"], 3);
        assert_eq!(found["logs"][0]["left_out"]["index"], 4);
        assert_eq!(found["logs"][0]["left_out"]["stamp_ms"], 1_200_000);
        let all = find(None, None).expect("found").json();
        assert!(all["logs"][0]["left_out"].is_null());
    }

    #[test]
    fn times_are_read() {
        for (text, ms) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29T12:00:00Z", 951_825_600_000),
            ("2026-11-21T23:30:00Z", 1_795_303_800_000),
            ("2026-11-22T00:30:00.25+01:00", 1_795_303_800_250),
            ("2026-11-21 18:00:00.123456789-05:30", 1_795_303_800_123),
            ("1795303800000", 1_795_303_800_000),
        ] {
            assert_eq!(parse_time(text).unwrap(), ms, "{text}");
        }
        for text in [
            "",
            "yesterday",
            "2026-11-21",
            "2026-11-21T23:30Z",
            "2026-13-21T23:30:00Z",
            "2026-02-29T23:30:00Z",
            "2026-11-21T24:30:00Z",
            "2026-11-21T23:30:00",
            "2026-11-21T23:30:00.Z",
            "2026-11-21T23:30:00+1:00",
            "1969-12-31T23:59:59Z",
            "2026-11-21T23:30:00é",
            "-5",
        ] {
            assert!(parse_time(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn times_are_printed_as_they_are_read() {
        for ms in [
            0,
            951_825_600_000,
            1_795_303_800_123,
            4_102_444_799_999,
            u64::MAX,
            946_684_799_000,
        ] {
            assert_eq!(
                parse_time(&format_time(ms)).unwrap(),
                ms,
                "{}",
                format_time(ms)
            );
        }
        assert_eq!(format_time(1_795_303_800_250), "2026-11-21T23:30:00.25Z");
    }
}
