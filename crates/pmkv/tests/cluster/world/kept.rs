//! Checkpoints of indexes.

use std::sync::{Arc, Mutex};

use cyclone_pmkv::Sink;

/// A checkpoint in memory that survives everything.
pub struct Kept {
    bytes: Vec<u8>,
    whole: Arc<Mutex<Vec<u8>>>,
}

impl Kept {
    /// When it is whole, it is found there.
    pub fn new(whole: &Arc<Mutex<Vec<u8>>>) -> Kept {
        Kept {
            bytes: Vec::new(),
            whole: Arc::clone(whole),
        }
    }
}

impl Sink for Kept {
    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn finish(&mut self) -> std::io::Result<()> {
        *self.whole.lock().expect("bytes") = std::mem::take(&mut self.bytes);
        Ok(())
    }
}
