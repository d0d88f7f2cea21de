//! One endpoint of the provider with its address vector and completion queue, and registered
//! memory: the only file that moves bytes through libfabric.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_void};
use std::os::fd::RawFd;
use std::ptr;

use super::graveyard::{self, Order};
use super::provider::{Provider, check, refused};
use super::sys;
use crate::endpoint::FabricError;

/// Completions read at once.
const BATCH: usize = 32;

/// An endpoint, enabled.
pub struct Port {
    endpoint: *mut sys::fid_ep,
    addresses: *mut sys::fid_av,
    completions: *mut sys::fid_cq,
    /// Not to be closed while others live: see graveyard.rs.
    named: bool,
}

// SAFETY: see Provider.
unsafe impl Send for Port {}

/// A piece of memory for the provider: where, how long, and its local registration (null where none
/// is needed).
#[derive(Clone, Copy)]
pub struct Piece {
    pub start: *mut u8,
    pub len: usize,
    pub descriptor: *mut c_void,
}

/// Memory of a peer: who, where, and under which key.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    pub peer: u64,
    pub address: u64,
    pub key: u64,
}

/// Why the provider did not take an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its queue is full: again after progress.
    Again,
    /// For good, with this error number.
    Error(i64),
}

/// One completion. `context` is the pointer that was given with the operation.
pub struct Completion {
    pub context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub start: *mut u8,
    pub data: u64,
    /// The error and the provider's words for it, if it failed.
    pub error: Option<(i32, String)>,
}

// SAFETY: the pointers are names here: of a slot, and of a place in a segment.
unsafe impl Send for Completion {}

fn outcome(code: isize) -> Result<(), Refusal> {
    match code as i64 {
        0 => Ok(()),
        sys::AGAIN => Err(Refusal::Again),
        code => Err(Refusal::Error(code)),
    }
}

fn iovec(piece: Piece) -> sys::iovec {
    sys::iovec {
        iov_base: piece.start.cast(),
        iov_len: piece.len,
    }
}

impl Port {
    /// Opens an endpoint, at `address` or one of the provider's choosing (`name` where endpoints
    /// have names).
    pub fn open(
        provider: &Provider,
        address: Option<&[u8]>,
        name: Option<&str>,
        queue: usize,
    ) -> Result<Port, FabricError> {
        let info = provider.info_at(address, name)?;
        let before = open_files();
        let opened = Port::open_with(provider, info, queue);
        keep_from_children(&before);
        // SAFETY: info_at gave it to us; endpoints do not keep it.
        unsafe { sys::fi_freeinfo(info) };
        opened
    }

    fn open_with(
        provider: &Provider,
        info: *mut sys::fi_info,
        queue: usize,
    ) -> Result<Port, FabricError> {
        let mut port = Port {
            endpoint: ptr::null_mut(),
            addresses: ptr::null_mut(),
            completions: ptr::null_mut(),
            named: provider.named(),
        };
        // SAFETY: plain attribute structures, for which zero means "the default"; the domain
        // outlives the port, and what was opened is closed by `drop` even if a later call fails.
        unsafe {
            let mut cq: sys::fi_cq_attr = std::mem::zeroed();
            cq.size = queue;
            cq.format = sys::FI_CQ_FORMAT_DATA;
            cq.wait_obj = sys::FI_WAIT_NONE;
            let domain = provider.domain();
            check(
                "fi_cq_open",
                sys::fi_cq_open(domain, &mut cq, &mut port.completions, ptr::null_mut()),
            )?;
            let mut av: sys::fi_av_attr = std::mem::zeroed();
            av.type_ = sys::FI_AV_TABLE;
            check(
                "fi_av_open",
                sys::fi_av_open(domain, &mut av, &mut port.addresses, ptr::null_mut()),
            )?;
            check(
                "fi_endpoint",
                sys::fi_endpoint(domain, info, &mut port.endpoint, ptr::null_mut()),
            )?;
            let bind = |fid: *mut sys::fid, flags: u64| {
                check("fi_ep_bind", sys::fi_ep_bind(port.endpoint, fid, flags))
            };
            bind(&mut (*port.completions).fid, sys::TRANSMIT | sys::RECV)?;
            bind(&mut (*port.addresses).fid, 0)?;
            check("fi_enable", sys::fi_enable(port.endpoint))?;
        }
        Ok(port)
    }

    /// The address that peers insert.
    pub fn address(&self) -> Result<Vec<u8>, FabricError> {
        let mut bytes = vec![0u8; 512];
        let mut len = bytes.len();
        // SAFETY: the endpoint is open, and `len` is the buffer's length.
        let code = unsafe {
            sys::fi_getname(
                &mut (*self.endpoint).fid,
                bytes.as_mut_ptr().cast(),
                &mut len,
            )
        };
        check("fi_getname", code)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Makes a peer's address known.
    pub fn insert(&self, address: &[u8]) -> Result<u64, FabricError> {
        // libfabric 1.17's shm crashes on a name that does not exist.
        if self.named && !name_exists(address) {
            return Err(refused("fi_av_insert", i64::from(libc::ENOENT)));
        }
        // Names must end in a zero byte and IP addresses be of a family's full length, whatever a
        // peer sent.
        let mut padded = address.to_vec();
        padded.resize(address.len().max(128) + 1, 0);
        let mut peer = sys::ANYONE;
        // SAFETY: the address is followed by zeros beyond any format's length.
        let inserted = unsafe {
            sys::fi_av_insert(
                self.addresses,
                padded.as_ptr().cast(),
                1,
                &mut peer,
                0,
                ptr::null_mut(),
            )
        };
        if inserted == 1 && peer != sys::ANYONE {
            Ok(peer)
        } else {
            Err(refused(
                "fi_av_insert",
                i64::from(inserted.min(0)).max(-4096),
            ))
        }
    }

    /// Releases a multi-receive buffer once less than this many bytes are left in it.
    pub fn set_least_room(&self, bytes: usize) -> Result<(), FabricError> {
        // SAFETY: the option is a size_t.
        let code = unsafe {
            sys::fi_setopt(
                &mut (*self.endpoint).fid,
                sys::FI_OPT_ENDPOINT as i32,
                sys::FI_OPT_MIN_MULTI_RECV as i32,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            )
        };
        check("fi_setopt", code)
    }

    /// Sends a message, with 8 bytes beside it if `data` is given.
    ///
    /// # Safety
    /// `piece` and `context` (64 bytes) stay valid and untouched until the completion, or until the
    /// port is dropped.
    pub unsafe fn send(
        &self,
        peer: u64,
        piece: Piece,
        data: Option<u64>,
        flags: u64,
        context: *mut c_void,
    ) -> Result<(), Refusal> {
        let vector = iovec(piece);
        let mut descriptor = piece.descriptor;
        let message = sys::fi_msg {
            msg_iov: &vector,
            desc: &mut descriptor,
            iov_count: 1,
            addr: peer,
            context,
            data: data.unwrap_or(0),
        };
        let flags = flags | sys::COMPLETION | data.map_or(0, |_| sys::REMOTE_CQ_DATA);
        // SAFETY: by this function's contract; the vectors are copied before the call returns.
        outcome(unsafe { sys::fi_sendmsg(self.endpoint, &message, flags) })
    }

    /// Posts a buffer for one message, or for many (`FI_MULTI_RECV` in `flags`).
    ///
    /// # Safety
    /// As for [`Port::send`].
    pub unsafe fn receive(
        &self,
        piece: Piece,
        flags: u64,
        context: *mut c_void,
    ) -> Result<(), Refusal> {
        let vector = iovec(piece);
        let mut descriptor = piece.descriptor;
        let message = sys::fi_msg {
            msg_iov: &vector,
            desc: &mut descriptor,
            iov_count: 1,
            addr: sys::ANYONE,
            context,
            data: 0,
        };
        // SAFETY: by this function's contract.
        outcome(unsafe { sys::fi_recvmsg(self.endpoint, &message, flags | sys::COMPLETION) })
    }

    /// Writes to (or, with `read`, reads from) a peer's memory.
    ///
    /// # Safety
    /// As for [`Port::send`].
    pub unsafe fn transfer(
        &self,
        read: bool,
        piece: Piece,
        remote: Remote,
        flags: u64,
        context: *mut c_void,
    ) -> Result<(), Refusal> {
        let vector = iovec(piece);
        let target = sys::fi_rma_iov {
            addr: remote.address,
            len: piece.len,
            key: remote.key,
        };
        let mut descriptor = piece.descriptor;
        let message = sys::fi_msg_rma {
            msg_iov: &vector,
            desc: &mut descriptor,
            iov_count: 1,
            addr: remote.peer,
            rma_iov: &target,
            rma_iov_count: 1,
            context,
            data: 0,
        };
        let flags = flags | sys::COMPLETION;
        // SAFETY: by this function's contract.
        outcome(unsafe {
            if read {
                sys::fi_readmsg(self.endpoint, &message, flags)
            } else {
                sys::fi_writemsg(self.endpoint, &message, flags)
            }
        })
    }

    /// A 64-bit atomic: fetch-add of the piece's first word, or, with `compare`, compare-swap: word
    /// 0 is the new value, word 1 the old one. The word before comes to word 2.
    ///
    /// # Safety
    /// As for [`Port::send`]; the piece has at least 24 bytes, aligned to 8.
    pub unsafe fn atomic(
        &self,
        compare: bool,
        piece: Piece,
        remote: Remote,
        context: *mut c_void,
    ) -> Result<(), Refusal> {
        let Remote { peer, address, key } = remote;
        let desc = piece.descriptor;
        // SAFETY: by this function's contract.
        outcome(unsafe {
            let operand = piece.start;
            let result = piece.start.add(16);
            if compare {
                sys::fi_compare_atomic(
                    self.endpoint,
                    operand.cast(),
                    1,
                    desc,
                    piece.start.add(8).cast(),
                    desc,
                    result.cast(),
                    desc,
                    peer,
                    address,
                    key,
                    sys::FI_UINT64,
                    sys::FI_CSWAP,
                    context,
                )
            } else {
                sys::fi_fetch_atomic(
                    self.endpoint,
                    operand.cast(),
                    1,
                    desc,
                    result.cast(),
                    desc,
                    peer,
                    address,
                    key,
                    sys::FI_UINT64,
                    sys::FI_SUM,
                    context,
                )
            }
        })
    }

    /// Makes progress and takes completions; answers how many.
    pub fn poll(&self, into: &mut Vec<Completion>) -> usize {
        // SAFETY: plain entries, for which zero is a value.
        let mut entries: [sys::fi_cq_data_entry; BATCH] = unsafe { std::mem::zeroed() };
        // SAFETY: room for BATCH entries of the format that the queue was opened with.
        let code =
            unsafe { sys::fi_cq_read(self.completions, entries.as_mut_ptr().cast(), BATCH) } as i64;
        match code {
            sys::AGAIN => 0,
            sys::ERROR_AVAILABLE => self.take_error(into),
            count if count > 0 => {
                let count = (count as usize).min(BATCH);
                into.extend(entries[..count].iter().map(|entry| Completion {
                    context: entry.op_context,
                    flags: entry.flags,
                    len: entry.len,
                    start: entry.buf.cast(),
                    data: entry.data,
                    error: None,
                }));
                count
            }
            _ => 0,
        }
    }

    fn take_error(&self, into: &mut Vec<Completion>) -> usize {
        // SAFETY: a plain entry; zero means "no room for provider data", as err_data_size 0 does.
        let mut entry: sys::fi_cq_err_entry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open.
        let code = unsafe { sys::fi_cq_readerr(self.completions, &mut entry, 0) };
        if code != 1 {
            return 0;
        }
        // SAFETY: the answer is a static string or null; no buffer is given.
        let words = unsafe {
            let words = sys::fi_cq_strerror(
                self.completions,
                entry.prov_errno,
                entry.err_data,
                ptr::null_mut(),
                0,
            );
            if words.is_null() {
                String::new()
            } else {
                CStr::from_ptr(words).to_string_lossy().into_owned()
            }
        };
        into.push(Completion {
            context: entry.op_context,
            flags: entry.flags,
            len: entry.len,
            start: entry.buf.cast(),
            data: entry.data,
            error: Some((
                entry.err,
                format!("{} ({words})", sys::text(i64::from(entry.err))),
            )),
        });
        1
    }

    fn fid(&self) -> *mut sys::fid {
        // SAFETY: the endpoint is open as long as `self` lives.
        unsafe { &mut (*self.endpoint).fid }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // An object's `fid` is its first field: a null object has a null one.
        let parts: [(*mut sys::fid, Order); 3] = [
            (self.endpoint.cast(), Order::Endpoint),
            (self.addresses.cast(), Order::Bound),
            (self.completions.cast(), Order::Bound),
        ];
        for (fid, order) in parts {
            if self.named {
                graveyard::bury(fid, order);
            } else if !fid.is_null() {
                // SAFETY: each was opened once; the endpoint goes before what is bound to it.
                unsafe { sys::fi_close(fid) };
            }
        }
    }
}

/// This process's file descriptors.
fn open_files() -> BTreeSet<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return BTreeSet::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// libfabric opens its sockets such that processes started later have them too, and one that
/// outlives the endpoint keeps its address. Whatever was not open `before` is closed in new
/// processes.
fn keep_from_children(before: &BTreeSet<RawFd>) {
    for file in open_files().difference(before) {
        // SAFETY: sets one flag of a descriptor, if there is one of that number. If it belongs to
        // another thread, which opened it in the same moment, it has that flag already: the
        // standard library sets it everywhere.
        unsafe { libc::fcntl(*file, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
}

/// Whether an endpoint of that name (`fi_shm://NAME`) is there.
fn name_exists(address: &[u8]) -> bool {
    let address = address.split(|&byte| byte == 0).next().unwrap_or(&[]);
    let Ok(address) = std::str::from_utf8(address) else {
        return false;
    };
    let name = address.strip_prefix("fi_shm://").unwrap_or(address);
    let plain = !name.is_empty() && !name.contains('/');
    plain && std::path::Path::new("/dev/shm").join(name).exists()
}

/// Registered memory.
pub struct Registered(*mut sys::fid_mr);

// SAFETY: see Provider.
unsafe impl Send for Registered {}

impl Registered {
    /// Registers `len` bytes from `start`. `access` and `flags` are libfabric's; `key` is used
    /// where applications choose keys.
    ///
    /// # Safety
    /// The bytes stay mapped until this is dropped, and peers may change them at any time if
    /// `access` lets them.
    pub unsafe fn new(
        provider: &Provider,
        port: &Port,
        (start, len): (*mut u8, usize),
        access: u64,
        key: u64,
        flags: u64,
    ) -> Result<Registered, FabricError> {
        let mut mr = ptr::null_mut();
        // SAFETY: by this function's contract.
        let code = unsafe {
            sys::fi_mr_reg(
                provider.domain(),
                start.cast(),
                len,
                access,
                0,
                key,
                flags,
                &mut mr,
                ptr::null_mut(),
            )
        };
        check("fi_mr_reg", code)?;
        let registered = Registered(mr);
        if provider.terms().endpoint_registration {
            // SAFETY: both are open.
            unsafe {
                check("fi_mr_bind", sys::fi_mr_bind(mr, port.fid(), 0))?;
                check("fi_mr_enable", sys::fi_mr_enable(mr))?;
            }
        }
        Ok(registered)
    }

    /// The key that peers must give.
    pub fn key(&self) -> u64 {
        // SAFETY: open as long as `self` lives.
        unsafe { sys::fi_mr_key(self.0) }
    }

    /// What local operations must give.
    pub fn descriptor(&self) -> *mut c_void {
        // SAFETY: open as long as `self` lives.
        unsafe { sys::fi_mr_desc(self.0) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: opened once.
        unsafe { sys::fi_close(&mut (*self.0).fid) };
    }
}
