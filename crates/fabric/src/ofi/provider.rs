//! Choosing a provider by name and hints, and what it declares.
//!
//! Nothing here knows a provider by name but for two things: `shm` endpoints have names where
//! others have IP addresses, and `sockets` must not be given much at once.

use std::ffi::{CStr, CString};
use std::ptr;

use super::graveyard::{self, Order};
use super::sys;
use crate::endpoint::FabricError;

/// What the provider declared in its `fi_info`; sizes are its own, bounded by the options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The provider's full name: `tcp;ofi_rxm` where `tcp` was asked for.
    pub name: String,
    /// Applications choose remote keys (no `FI_MR_PROV_KEY`): keys are derived from tokens.
    pub application_keys: bool,
    /// Which bits a remote key may have.
    pub key_mask: u64,
    /// Remote addresses are the target's virtual ones (`FI_MR_VIRT_ADDR`), not offsets.
    pub virtual_addresses: bool,
    /// Local buffers must be registered (`FI_MR_LOCAL`).
    pub local_registration: bool,
    /// Registrations must be bound to an endpoint (`FI_MR_ENDPOINT`).
    pub endpoint_registration: bool,
    /// 64-bit fetch-add and compare-swap work (`fi_query_atomic`).
    pub atomics: bool,
    /// Many messages fill one posted buffer (`FI_MULTI_RECV`), and carry 8 bytes of data beside.
    pub multi_receive: bool,
    /// A write may complete when it is durable (`FI_RMA_PMEM`, `FI_COMMIT_COMPLETE`).
    pub commit: bool,
    /// A message sent after a write is handled after it (`FI_ORDER_SAW`).
    pub send_after_write: bool,
    /// Reads, writes and the bytes of one write take effect in order (`FI_ORDER_WAW`, `RAW`, `WAR`,
    /// `DATA`).
    pub ordered: bool,
    /// The target's program must drive progress (`FI_PROGRESS_MANUAL`).
    pub manual_progress: bool,
    /// The most bytes in one transfer.
    pub max_transfer: usize,
    /// The most bytes that one connection may have in flight, but for a single larger transfer.
    pub max_flying: Option<usize>,
}

/// `sockets` peeks at a message's first 24 bytes, and takes nothing before all have come. Linux
/// charges a receive buffer for whole packets until their last byte is taken. So when a large
/// packet ends within such a head and what came behind it fills the buffer (131,072 bytes by
/// default), both wait for each other and nothing moves between these two endpoints again, until
/// our time-outs end the connection. Less than half a buffer in flight cannot fill it. Several
/// connections between the same endpoints have one stream: with large transfers on more than one of
/// them, or both ways, it can still happen.
const SOCKETS_FLYING: usize = 16 * 1024;

/// An open provider: fabric and domain.
pub struct Provider {
    info: *mut sys::fi_info,
    fabric: *mut sys::fid_fabric,
    domain: *mut sys::fid_domain,
    terms: Terms,
}

// SAFETY: the objects may be used from any thread (FI_THREAD_SAFE was asked for), and are only used
// under one lock.
unsafe impl Send for Provider {}

/// The provider's refusal as our error.
pub fn refused(call: &'static str, code: i64) -> FabricError {
    FabricError::Provider {
        call,
        message: sys::text(code),
    }
}

/// `Ok` for 0.
pub fn check(call: &'static str, code: i32) -> Result<(), FabricError> {
    if code == 0 {
        Ok(())
    } else {
        Err(refused(call, i64::from(code)))
    }
}

/// What one `fi_getinfo` asks for.
#[derive(Clone, Copy)]
struct Wish {
    caps: u64,
    mr_mode: u32,
}

/// From the best to the least: application keys before provider keys, then atomics, appends and
/// commits.
fn wishes() -> impl Iterator<Item = Wish> {
    let local = sys::FI_MR_LOCAL | sys::FI_MR_ALLOCATED | sys::FI_MR_ENDPOINT;
    let modes = [local, local | sys::FI_MR_VIRT_ADDR | sys::FI_MR_PROV_KEY];
    let extras = (0..8u64).map(|without| {
        let or = |bit: u64, caps: u64| if without & bit == 0 { caps } else { 0 };
        or(4, sys::ATOMIC) | or(2, sys::MULTI_RECV) | or(1, sys::RMA_PMEM)
    });
    modes.into_iter().flat_map(move |mr_mode| {
        extras.clone().map(move |extra| Wish {
            caps: sys::MSG | sys::RMA | extra,
            mr_mode,
        })
    })
}

fn get_info(
    provider: &CStr,
    node: Option<&CStr>,
    wish: Wish,
) -> Result<*mut sys::fi_info, FabricError> {
    let mut found = ptr::null_mut();
    // SAFETY: `hints` is a fresh fi_info whose sub-structures fi_allocinfo made; it is freed here,
    // with the name that fi_freeinfo frees too and that strdup allocated as it must be.
    let code = unsafe {
        let hints = sys::fi_dupinfo(ptr::null());
        if hints.is_null() {
            return Err(refused("fi_allocinfo", -12));
        }
        (*hints).caps = wish.caps;
        (*hints).mode = sys::CONTEXT | sys::CONTEXT2;
        (*(*hints).fabric_attr).prov_name = libc::strdup(provider.as_ptr());
        (*(*hints).ep_attr).type_ = sys::FI_EP_RDM;
        (*(*hints).domain_attr).mr_mode = wish.mr_mode as _;
        (*(*hints).domain_attr).threading = sys::FI_THREAD_SAFE;
        let (node, flags) = match node {
            Some(node) => (node.as_ptr(), sys::SOURCE),
            None => (ptr::null(), 0),
        };
        let version = (1 << 16) | 17;
        let code = sys::fi_getinfo(version, node, ptr::null(), flags, hints, &mut found);
        sys::fi_freeinfo(hints);
        code
    };
    check("fi_getinfo", code).map(|()| found)
}

impl Provider {
    /// Opens the provider `name` at `node`: an IP address or host name, an endpoint's name for
    /// `shm`.
    pub fn open(
        name: &str,
        node: Option<&str>,
        max_transfer: usize,
    ) -> Result<Provider, FabricError> {
        let text = |what: &str| {
            CString::new(what).map_err(|_| FabricError::Unsupported {
                provider: what.escape_default().to_string(),
                what: "have a name with a zero byte",
            })
        };
        let c_name = text(name)?;
        let c_node = node.map(text).transpose()?;
        let mut last = refused("fi_getinfo", 61);
        for wish in wishes() {
            match get_info(&c_name, c_node.as_deref(), wish) {
                Ok(info) => return Provider::from_info(info, max_transfer),
                Err(why) => last = why,
            }
        }
        Err(last)
    }

    fn from_info(info: *mut sys::fi_info, max_transfer: usize) -> Result<Provider, FabricError> {
        let mut provider = Provider {
            info,
            fabric: ptr::null_mut(),
            domain: ptr::null_mut(),
            terms: read_terms(info, max_transfer),
        };
        if provider.named() {
            graveyard::born();
        }
        // SAFETY: `info` came from fi_getinfo and lives as long as `provider`.
        unsafe {
            check(
                "fi_fabric",
                sys::fi_fabric((*info).fabric_attr, &mut provider.fabric, ptr::null_mut()),
            )?;
            check(
                "fi_domain",
                sys::fi_domain(provider.fabric, info, &mut provider.domain, ptr::null_mut()),
            )?;
        }
        provider.terms.atomics &= provider.has_atomics();
        // Messages to the target's thread take their place, which writes behind them may overtake.
        provider.terms.ordered &= provider.terms.atomics;
        Ok(provider)
    }

    fn has_atomics(&self) -> bool {
        let wanted = [
            (sys::FI_SUM, sys::FETCH_ATOMIC),
            (sys::FI_CSWAP, sys::COMPARE_ATOMIC),
        ];
        wanted.into_iter().all(|(operation, flags)| {
            // SAFETY: plain counters, for which zero is a value.
            let mut attributes: sys::fi_atomic_attr = unsafe { std::mem::zeroed() };
            // SAFETY: the domain is open.
            let code = unsafe {
                sys::fi_query_atomic(
                    self.domain,
                    sys::FI_UINT64,
                    operation,
                    &mut attributes,
                    flags,
                )
            };
            code == 0 && attributes.count >= 1 && attributes.size == 8
        })
    }

    /// What it declares.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(super) fn domain(&self) -> *mut sys::fid_domain {
        self.domain
    }

    /// An `fi_info` for another endpoint of this domain, at a given address or one of the
    /// provider's choosing. The caller frees it.
    pub(super) fn info_at(
        &self,
        address: Option<&[u8]>,
        name: Option<&str>,
    ) -> Result<*mut sys::fi_info, FabricError> {
        let bytes: Option<Vec<u8>> = match (address, name) {
            (Some(address), _) => Some(address.to_vec()),
            (None, Some(name)) if self.named() => {
                let mut bytes = format!("fi_shm://{name}").into_bytes();
                bytes.push(0);
                Some(bytes)
            }
            _ => None,
        };
        // SAFETY: `info` is ours; the copy's source address is replaced by one that malloc
        // allocated, as fi_freeinfo expects.
        unsafe {
            let copy = sys::fi_dupinfo(self.info);
            if copy.is_null() {
                return Err(refused("fi_dupinfo", 12));
            }
            if let Some(bytes) = bytes {
                let place = libc::malloc(bytes.len()).cast::<u8>();
                if place.is_null() {
                    sys::fi_freeinfo(copy);
                    return Err(refused("fi_dupinfo", 12));
                }
                ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len());
                libc::free((*copy).src_addr);
                (*copy).src_addr = place.cast();
                (*copy).src_addrlen = bytes.len();
            }
            Ok(copy)
        }
    }

    /// Whether endpoints have names where others have IP addresses.
    pub(super) fn named(&self) -> bool {
        // SAFETY: `info` lives as long as `self`.
        unsafe { (*self.info).addr_format == sys::FI_ADDR_STR }
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        // As for Port; everything opened in them was dropped before (field order of Core).
        let parts: [(*mut sys::fid, Order); 2] = [
            (self.domain.cast(), Order::Domain),
            (self.fabric.cast(), Order::Fabric),
        ];
        let named = self.named();
        for (fid, order) in parts {
            if named {
                graveyard::bury(fid, order);
            } else if !fid.is_null() {
                // SAFETY: each was opened once.
                unsafe { sys::fi_close(fid) };
            }
        }
        if named {
            graveyard::died();
        }
        // SAFETY: fi_getinfo gave it to us; domains and endpoints keep no pointer to it.
        unsafe { sys::fi_freeinfo(self.info) };
    }
}

fn read_terms(info: *mut sys::fi_info, max_transfer: usize) -> Terms {
    // SAFETY: fi_getinfo filled every sub-structure.
    let (info, tx, rx, ep, domain, name) = unsafe {
        (
            &*info,
            &*(*info).tx_attr,
            &*(*info).rx_attr,
            &*(*info).ep_attr,
            &*(*info).domain_attr,
            CStr::from_ptr((*(*info).fabric_attr).prov_name),
        )
    };
    let mr = |bit: u32| domain.mr_mode as u32 & bit != 0;
    // An order holds only where both sides keep it.
    let order = tx.msg_order & rx.msg_order;
    let max_transfer = max_transfer.min(ep.max_msg_size);
    let sized = ep.max_order_raw_size >= max_transfer
        && ep.max_order_war_size >= max_transfer
        && ep.max_order_waw_size >= max_transfer;
    let wanted = sys::ORDER_WAW | sys::ORDER_RAW | sys::ORDER_WAR;
    let name = name.to_string_lossy().into_owned();
    Terms {
        max_flying: (name == "sockets").then_some(SOCKETS_FLYING),
        name,
        application_keys: !mr(sys::FI_MR_PROV_KEY),
        key_mask: match domain.mr_key_size {
            0 => 0,
            size @ 1..8 => (1 << (8 * size)) - 1,
            _ => u64::MAX,
        },
        virtual_addresses: mr(sys::FI_MR_VIRT_ADDR),
        local_registration: mr(sys::FI_MR_LOCAL),
        endpoint_registration: mr(sys::FI_MR_ENDPOINT),
        atomics: info.caps & sys::ATOMIC != 0,
        multi_receive: info.caps & sys::MULTI_RECV != 0 && domain.cq_data_size >= 8,
        commit: info.caps & sys::RMA_PMEM != 0,
        send_after_write: order & sys::ORDER_SAW != 0,
        ordered: sized && order & wanted == wanted && rx.comp_order & sys::ORDER_DATA != 0,
        manual_progress: domain.data_progress == sys::FI_PROGRESS_MANUAL,
        max_transfer,
    }
}
