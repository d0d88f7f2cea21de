//! What the log says when the area cannot grow, or has no room from the beginning.

#[path = "support/levels.rs"]
mod levels;

use cyclone_wal::flash::{
    Action, Buffers, Completion, DeviceError, FlashDevice, FlashError, FlashLog, FlashMode,
    FlashState, Request, SimDisk, SimFlash,
};
use levels::{Levels, SEGMENT, SEGMENTS, WHO, first_hard_state, spec};

/// A device that writes everything but the zeros by which an area grows.
struct Stunted {
    device: SimFlash,
    error: DeviceError,
    failed: Vec<Request>,
    /// Nor does it set anything aside.
    reserves: bool,
}

impl Stunted {
    fn on(disk: &SimDisk, error: DeviceError) -> Box<Stunted> {
        Box::new(Stunted {
            device: disk.device(),
            error,
            failed: Vec::new(),
            reserves: true,
        })
    }
}

impl FlashDevice for Stunted {
    fn bytes(&self) -> u64 {
        self.device.bytes()
    }

    fn grown_bytes(&self) -> u64 {
        self.device.grown_bytes()
    }

    fn reserve(&mut self, _bytes: u64) -> Result<(), DeviceError> {
        match self.reserves {
            true => Ok(()),
            false => Err(self.error),
        }
    }

    fn register(&mut self, buffers: &Buffers) {
        self.device.register(buffers);
    }

    fn submit(&mut self, now_us: u64, request: Request) -> Result<(), Request> {
        let bytes = &request.buffer[..request.len];
        let zeros = bytes.len() == SEGMENT as usize && bytes.iter().all(|byte| *byte == 0);
        if request.action == Action::Write && zeros {
            self.failed.push(request);
            return Ok(());
        }
        self.device.submit(now_us, request)
    }

    fn poll(&mut self, now_us: u64, done: &mut Vec<Completion>) {
        done.extend(self.failed.drain(..).map(|request| Completion {
            token: request.token,
            action: request.action,
            buffer: request.buffer,
            result: Err(self.error),
        }));
        self.device.poll(now_us, done);
    }

    fn wait(&mut self) {
        self.device.wait();
    }

    fn outstanding(&self) -> usize {
        self.device.outstanding() + self.failed.len()
    }

    fn describe(&self) -> String {
        self.device.describe()
    }
}

const ERRORS: [DeviceError; 2] = [DeviceError::Io(5), DeviceError::NoSpace];

#[test]
fn a_new_area_that_cannot_grow_is_refused_with_the_devices_own_words() {
    for error in ERRORS {
        let disk = SimDisk::new(u64::from(SEGMENT) * SEGMENTS, 1);
        let device = Stunted::on(&disk, error);
        let mode = FlashMode::Only;
        let made = FlashLog::create(device, spec(mode), &WHO, 9, (0, 0), &first_hard_state());
        assert_eq!(
            made.map(|_| ()),
            Err(FlashError::Device(error)),
            "{error:?}"
        );
    }
}

/// The log waits for room that the area does not get: only a device without space counts as full.
#[test]
fn a_log_that_waits_for_growth_says_what_keeps_it() {
    for error in ERRORS {
        let mut levels = Levels::new(FlashMode::Second, 4);
        let device = Stunted::on(&levels.disk, error);
        (levels.flash, _) =
            FlashLog::open(device, spec(FlashMode::Second), &WHO).expect("it is whole");
        let mut last = 0;
        while levels.flash.state(levels.now_us) == FlashState::Ready {
            last += u64::from(levels.append(last + 1, 1, 2_000));
            assert!(last < 400, "it never fills: {error:?}");
            levels.pass(1_000, last);
            let through = levels.flash.durable_index();
            levels.ring.trim(through).expect("within the log");
        }
        match (levels.flash.state(levels.now_us), error) {
            (FlashState::DeviceFull { .. }, DeviceError::NoSpace) => {}
            (FlashState::Failing { error: told, .. }, error) if told == error => {}
            (state, _) => panic!("{error}: {state:?}"),
        }
        // Once it grows, all is well.
        let device = Box::new(levels.disk.device());
        levels.disk.settle();
        (levels.flash, _) =
            FlashLog::open(device, spec(FlashMode::Second), &WHO).expect("it is whole");
        levels.settle(last);
        assert_eq!(
            levels.flash.state(levels.now_us),
            FlashState::Ready,
            "{error:?}"
        );
    }
}

/// Only a new area is refused where there is no room for it: one that is there has what a replica
/// knows.
#[test]
fn an_area_without_room_is_refused_only_when_it_is_new() {
    let spec = spec(FlashMode::Second);
    let crowded = |disk: &SimDisk, error| {
        let device = Stunted::on(disk, error);
        Box::new(Stunted {
            reserves: false,
            ..*device
        })
    };
    let hard = first_hard_state();
    let disk = SimDisk::new(spec.bytes, 1);
    let device = crowded(&disk, DeviceError::NoSpace);
    let refused = FlashLog::create(device, spec, &WHO, 9, (0, 0), &hard).map(|_| ());
    let bytes = spec.bytes;
    assert_eq!(refused, Err(FlashError::NoRoom { bytes }));
    assert!(disk.written().is_empty(), "nothing was written");
    // A device that cannot say why sets nothing aside, and that is all.
    let device = crowded(&disk, DeviceError::Io(5));
    let made = FlashLog::create(device, spec, &WHO, 9, (0, 0), &hard).map(|_| ());
    assert_eq!(made, Ok(()));
    let device = crowded(&disk, DeviceError::NoSpace);
    assert_eq!(FlashLog::open(device, spec, &WHO).map(|_| ()), Ok(()));
    // Made anew where another one was.
    let device = crowded(&disk, DeviceError::NoSpace);
    let made = FlashLog::create(device, spec, &WHO, 9, (0, 0), &hard).map(|_| ());
    assert_eq!(made, Ok(()));
}
