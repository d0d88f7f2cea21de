//! Checkpoints of indexes.

use std::sync::{Arc, Mutex};

use cyclone_pmkv::Sink;

/// A checkpoint in memory that survives everything.
pub struct Kept {
    bytes: Vec<u8>,
    /// How often it was asked whether it is done: a disk takes its time.
    asked: u32,
    whole: Arc<Mutex<Vec<u8>>>,
}

impl Kept {
    /// When it is whole, it is found there.
    pub fn new(whole: &Arc<Mutex<Vec<u8>>>) -> Kept {
        Kept {
            bytes: Vec::new(),
            asked: 0,
            whole: Arc::clone(whole),
        }
    }
}

impl Sink for Kept {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(&mut self) -> std::io::Result<bool> {
        self.asked += 1;
        if self.asked < 3 {
            return Ok(false);
        }
        *self.whole.lock().expect("bytes") = std::mem::take(&mut self.bytes);
        Ok(true)
    }
}
