use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::*;
use crate::drive::{Done, Lane, Lanes, Outcome, Request, lanes};
use crate::system::Filling;
use crate::workload::Workload;

/// What happened, in order.
type Story = Rc<RefCell<Vec<String>>>;

/// A system that answers at once.
struct Instant {
    name: String,
    story: Story,
    absent: bool,
}

struct Runs(String, Story);

struct Queue(VecDeque<u64>);

struct Ways;

impl Lanes for Ways {
    fn lanes(&self, inflight: usize) -> usize {
        inflight.min(2)
    }

    fn open(&self, _number: usize, _share: usize) -> Result<Box<dyn Lane>> {
        Ok(Box::new(Queue(VecDeque::new())))
    }
}

impl Lane for Queue {
    fn submit(&mut self, token: u64, _request: Request<'_>) -> Result<()> {
        self.0.push_back(token);
        Ok(())
    }

    fn poll(&mut self, _patience: Duration, done: &mut Vec<Done>) -> Result<()> {
        std::thread::sleep(Duration::from_micros(100));
        done.extend(self.0.drain(..).map(|token| Done {
            token,
            outcome: Outcome::Done,
        }));
        Ok(())
    }
}

impl System for Instant {
    fn guarantee(&self) -> String {
        "none".into()
    }

    fn start(&self, scene: &Scene<'_>) -> Result<Started> {
        assert!(scene.disk.is_dir() && scene.memory.is_dir());
        assert_eq!(
            scene.disk.read_dir().expect("directory").count(),
            0,
            "afresh"
        );
        std::fs::write(scene.disk.join("data"), "left behind").expect("writes");
        if self.absent {
            return Ok(Started::Skipped {
                why: "not here".into(),
                install: "make it".into(),
            });
        }
        self.story.borrow_mut().push(format!("start {}", self.name));
        let running = Runs(self.name.clone(), Rc::clone(&self.story));
        Ok(Started::Running(Box::new(running)))
    }
}

impl Running for Runs {
    fn preload(&mut self, workload: &Workload, seed: u64, live: &mut Filling<'_>) -> Result<()> {
        lanes::preload(&Ways, workload, seed, 16, live)
    }

    fn measure(&mut self, job: &mut Job<'_>) -> Result<Measured> {
        if self.0 == "breaks" {
            bail!("it broke");
        }
        self.1
            .borrow_mut()
            .push(format!("measure {} {}", self.0, job.inflight));
        lanes::run(&Ways, job, &[])
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        self.1.borrow_mut().push(format!("end {}", self.0));
    }
}

/// The measured time is long enough for a thread that gets no CPU for a while to do something in
/// it.
const PLAN: &str = r#"
figure = "f"
title = "t"
paper = "p"
machine = "m"
[workload]
keys = 100
[load]
warm_up_ms = 5
measure_ms = 300
repetitions = 2
[sweep]
over = "inflight"
points = [1, 4]
"#;

fn plan(variants: &[&str]) -> Plan {
    let mut text = PLAN.to_owned();
    for name in variants {
        text.push_str(&format!(
            "[[variant]]\nname = \"{name}\"\nsystem = \"etcd\"\n"
        ));
    }
    Plan::parse(&text).expect("a plan")
}

fn run_plan(plan: &Plan, story: &Story) -> PlanResult {
    run_within(plan, story, Budget::new(false))
}

fn run_within(plan: &Plan, story: &Story, budget: Budget) -> PlanResult {
    let stop = AtomicBool::new(false);
    let systems = |variant: &Variant| -> Result<Box<dyn System>> {
        Ok(Box::new(Instant {
            name: variant.name.clone(),
            story: Rc::clone(story),
            absent: variant.name == "absent",
        }))
    };
    let mut options = Options {
        stem: "f".into(),
        quick: false,
        systems: &systems,
        settling: Duration::ZERO,
        budget,
        stop: &stop,
        progress: Progress::to(false, Box::new(std::io::sink()), steps(plan)),
    };
    run(plan, &mut options).expect("a result")
}

/// One test, because the directories are named after the process.
#[test]
fn variants_take_turns_and_one_that_is_absent_or_breaks_leaves_the_others_their_results() {
    side_by_side();
    out_of_time();
    let story = Story::default();
    let plan = plan(&["a", "absent", "breaks", "b"]);
    let result = run_plan(&plan, &story);
    let turn = |name: &str| {
        vec![
            format!("start {name}"),
            format!("measure {name} 1"),
            format!("measure {name} 4"),
            format!("end {name}"),
        ]
    };
    let mut expected = turn("a");
    expected.extend(["start breaks".to_owned(), "end breaks".to_owned()]);
    for name in ["b", "a", "b"] {
        expected.extend(turn(name));
    }
    assert_eq!(*story.borrow(), expected);
    for name in ["a", "b"] {
        let variant = result.variant(name).expect("a variant");
        assert!(variant.absent.is_none());
        assert_eq!(variant.points.len(), 2);
        assert!(variant.points.iter().all(|point| point.ops_s.least > 0.0));
        assert!(variant.points[0].latency.p50_us >= 90.0);
    }
    let absent = result.variant("absent").expect("a variant").absent.clone();
    assert_eq!(absent.expect("a reason").install, "make it");
    let broken = result.variant("breaks").expect("a variant").absent.clone();
    assert!(broken.expect("a reason").why.contains("it broke"));
    assert!(result.failed());
}

/// Nothing begins when the time is over, and what was left out is named.
fn out_of_time() {
    for is_together in [false, true] {
        let story = Story::default();
        let mut plan = plan(&["a", "b"]);
        plan.load.together = is_together;
        let over = Budget::of(Some(Duration::ZERO));
        let result = run_within(&plan, &story, over);
        let measured = story
            .borrow()
            .iter()
            .filter(|it| it.contains("measure"))
            .count();
        // Side by side one point is measured: all have been started then.
        let (points, left_out): (usize, &[&str]) = match is_together {
            false => (0, &["a", "b"]),
            true => (2, &["a, 4", "b, 4"]),
        };
        assert_eq!(measured, points);
        assert_eq!(result.left_out, left_out);
        assert!(!result.failed());
        assert!(
            !result.is_current(&plan, false, |_| true),
            "to be run again"
        );
    }
}

/// All are there at once, and the first of a point is the last of the next.
fn side_by_side() {
    let story = Story::default();
    let mut plan = plan(&["a", "absent", "breaks", "b"]);
    plan.load.together = true;
    plan.load.repetitions = 1;
    let result = run_plan(&plan, &story);
    let expected = [
        "start a",
        "start breaks",
        "start b",
        "measure b 1",
        "measure a 1",
        "measure b 4",
        "measure a 4",
    ];
    assert_eq!(story.borrow()[..expected.len()], expected);
    assert_eq!(
        story.borrow().len(),
        expected.len() + 3,
        "each is ended once"
    );
    let variant = |name: &str| result.variant(name).expect("a variant");
    assert_eq!(variant("a").points.len(), 2);
    assert_eq!(variant("b").points[1].each.len(), 1);
    assert!(variant("breaks").absent.as_ref().is_some_and(|a| a.failed));
    assert!(variant("absent").absent.as_ref().is_some_and(|a| !a.failed));
}

#[test]
fn the_outage_is_the_longest_gap_that_ends_after_the_kill() {
    let ms = |times: &[u64]| times.iter().map(|t| t * 1_000_000).collect::<Vec<u64>>();
    // A longer gap before the kill does not count; stragglers after it do not hide it.
    let ends = ms(&[0, 200, 201, 202, 203, 263, 264]);
    let outage = |ends: &[u64], kill: u64| outage_ms(ends, kill * 1_000_000, 265_000_000, 0);
    assert_eq!(outage(&ends, 202), Some(60.0));
    assert_eq!(outage(&ends, 300), None);
    assert_eq!(outage_ms(&ms(&[50]), 10_000_000, 55_000_000, 0), Some(40.0));
}

#[test]
fn an_outage_that_does_not_end_is_a_long_one() {
    // The killed one still answered for a short time.
    let ends: Vec<u64> = (0..=203).map(|ms| ms * 1_000_000).collect();
    let outage = |waited| outage_ms(&ends, 202_000_000, 2_500_000_000, waited);
    assert_eq!(outage(2_000_000_000), Some(4297.0));
    assert_eq!(outage(0), Some(2297.0));
    // What is never answered of a load that goes on does not make it one.
    let ends: Vec<u64> = (0..=203)
        .chain(300..2500)
        .map(|ms| ms * 1_000_000)
        .collect();
    let outage = outage_ms(&ends, 202_000_000, 2_500_000_000, 2_000_000_000);
    assert_eq!(outage, Some(97.0));
}

#[test]
fn a_timeline_counts_from_the_kill() {
    let ends: Vec<u64> = (0..100)
        .map(|n| n * 1_000_000)
        .filter(|n| !(50_000_000..70_000_000).contains(n))
        .collect();
    let line = timeline(&ends, 50_000_000, 100_000_000, 10);
    assert_eq!(line.len(), 10);
    assert_eq!(line[0], (-50.0, 1000.0));
    assert_eq!(line[5], (0.0, 0.0));
    assert_eq!(line[7], (20.0, 1000.0));
}
