//! SETs by the native client from one thread, pipelined.

use anyhow::Result;

use super::{Load, Measured};
use crate::cluster::LocalCluster;

/// Runs the load.
pub fn run(_cluster: &LocalCluster, _load: &Load) -> Result<Measured> {
    anyhow::bail!("the native client is not linked yet")
}
