//! Messages of every protocol: what is understood says the same when it is written and read again.
#![no_main]

use cyclone_wire::command::{Command, Query};
use cyclone_wire::envelope::{SnapshotChunk, SnapshotFetch};
use cyclone_wire::raftmsg::RaftMessage;
use cyclone_wire::reply::Reply;
use cyclone_wire::{archive, batch, client, envelope, gang, membership};
use libfuzzer_sys::fuzz_target;

/// Bytes of something that was understood.
fn written(encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&mut bytes);
    bytes
}

fn replicas(which: u8, bytes: &[u8]) {
    match which {
        0 => {
            if let Ok((message, payloads)) = RaftMessage::decode(bytes) {
                assert!(payloads <= bytes.len());
                let again = written(|out| message.encode_header(out));
                assert_eq!(&again[..], &bytes[..again.len()], "{message:?}");
            }
        }
        1 => {
            if let Ok((head, at)) = gang::Head::decode(bytes) {
                assert_eq!(written(|out| head.encode(out)), &bytes[..at]);
            }
        }
        2 => {
            if let Ok(report) = cyclone_wire::bootstrap::Report::decode(bytes) {
                assert_eq!(written(|out| report.encode(out)), bytes);
            }
            if let Ok(known) = membership::Known::decode(bytes) {
                assert_eq!(written(|out| known.encode(out)), bytes);
            }
        }
        3 => {
            if let Ok(record) = membership::Record::decode(bytes) {
                assert_eq!(written(|out| record.encode(out)), bytes);
            }
        }
        4 => {
            if let Ok(fetch) = SnapshotFetch::decode(bytes) {
                assert_eq!(&written(|out| fetch.encode(out))[1..], bytes);
            }
        }
        5 => {
            if let Ok(chunk) = SnapshotChunk::decode(bytes) {
                assert_eq!(&written(|out| chunk.encode(out))[1..], bytes);
            }
        }
        6 => {
            drop(envelope::decode_list(bytes));
            drop(envelope::decode_files(bytes));
        }
        _ => {
            if let Some(head) = bytes.first_chunk() {
                _ = archive::Head::decode(head);
            }
        }
    }
}

fn clients(which: u8, bytes: &[u8]) {
    match which {
        0 => {
            let mut requests = client::requests(bytes.len());
            while let Some(Ok(_)) = requests.next(bytes) {}
        }
        1 => client::responses(bytes).take_while(Result::is_ok).for_each(drop),
        2 => {
            if let Ok(command) = Command::decode(bytes) {
                let again = written(|out| command.encode(out));
                assert_eq!(Command::decode(&again), Ok(command));
            }
        }
        3 => {
            if let Ok(query) = Query::decode(bytes) {
                let again = written(|out| query.encode(out));
                assert_eq!(Query::decode(&again), Ok(query));
            }
        }
        4 => {
            if let Ok(reply) = Reply::decode(bytes) {
                let again = written(|out| reply.encode(out));
                assert_eq!(Reply::decode(&again), Ok(reply));
            }
        }
        5 => drop(batch::Head::decode(bytes)),
        _ => {
            if let Ok(commands) = batch::iter(bytes) {
                commands.for_each(drop);
            }
        }
    }
}

fn one_sided(which: u8, bytes: &[u8]) {
    match which {
        0 => drop(cyclone_pmkv::message::Message::decode(bytes)),
        1 => drop(cyclone_pmkv::entry::Entry::decode(bytes)),
        2 => drop(cyclone_pmkv_cm::FromServer::decode(bytes)),
        3 => drop(cyclone_pmkv_cm::ToServer::decode(bytes)),
        4 => drop(cyclone_pmkv_cm::Configuration::decode(bytes)),
        5 => drop(cyclone_replication::control::ToBackup::decode(bytes)),
        6 => drop(cyclone_replication::control::ToSender::decode(bytes)),
        _ => drop(cyclone_replication::frame::decode_block(7, bytes, 0)),
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&which, bytes)) = input.split_first() else {
        return;
    };
    match which / 8 % 3 {
        0 => replicas(which % 8, bytes),
        1 => clients(which % 8, bytes),
        _ => one_sided(which % 8, bytes),
    }
});
