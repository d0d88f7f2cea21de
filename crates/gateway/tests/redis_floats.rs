//! Redis itself as the judge of INCRBYFLOAT. Skipped where it is not installed.

mod common;

use common::judge::{Redis, difference};
use common::{Client, Server};

struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % below
    }

    fn number(&mut self) -> String {
        let sign = ["", "", "-", "+"][self.next(4) as usize];
        let small = self.next(1 << 40) as i64 - (1 << 39);
        let fraction = self.next(1_000_000);
        let digits = self.next(u64::MAX);
        let exponent = self.next(9_900) as i64 - 4_950;
        match self.next(10) {
            0 => format!("{small}"),
            1 => format!("{sign}{}.{fraction:06}", self.next(1_000)),
            2 => format!("{sign}0.{fraction}{digits}"),
            3 => format!("{sign}{digits}"),
            4 => format!("{sign}0x{digits:x}.{fraction:x}p{}", exponent / 40),
            5 => format!("{sign}{}e{exponent}", self.next(100)),
            6 => format!("{sign}0X{digits:X}"),
            7 => {
                let odd = [
                    "inf",
                    "-Infinity",
                    "nan",
                    "",
                    "1e",
                    "0x",
                    "1e5000",
                    "-1.18e4932",
                    " 1",
                    "1 ",
                ];
                odd[self.next(odd.len() as u64) as usize].to_owned()
            }
            8 => format!("{sign}{}", self.next(1 << 53) as f64 / 1e9),
            _ => format!("{sign}.{fraction}e{}", exponent / 200),
        }
    }
}

/// Random sums over values that are set at times; each reply is compared, and what is stored.
#[test]
fn sums_of_floats_are_those_of_redis() {
    let Some(redis) = Redis::start() else {
        return;
    };
    let server = Server::plain();
    let (mut ours, mut theirs) = (server.client(), Client::connect(redis.addr));
    let mut random = Random(0xf10a_7f10_a7f1_0a75);
    let mut found = Vec::new();
    let mut commands = Vec::new();
    for _ in 0..1_500 {
        if random.next(3) == 0 {
            commands.push(format!("SET f \"{}\"", random.number()));
        }
        commands.push(format!("INCRBYFLOAT f \"{}\"", random.number()));
    }
    for known in [
        "SET f 3",
        "INCRBYFLOAT f 1.1",
        "SET f 5.0e3",
        "INCRBYFLOAT f 2.0e2",
        "SET f 0.1",
        "INCRBYFLOAT f 0.2",
        "SET f 1",
        "INCRBYFLOAT f -1.1",
        "SET f 17179869184",
        "INCRBYFLOAT f 1.5",
        "SET f 0x10",
        "INCRBYFLOAT f 0x1p-3",
        "SET f 1e4932",
        "INCRBYFLOAT f 1e4931",
        "INCRBYFLOAT f 1e4932",
        "APPEND f x",
        "INCRBYFLOAT f inf",
    ] {
        commands.push(known.to_owned());
    }
    for command in commands {
        for line in [&command[..], "GET f"] {
            let line = format!("{line}\r\n");
            let [we, they] = [&mut ours, &mut theirs].map(|client| {
                client.send(&line);
                client.reply()
            });
            found.extend(difference(&line, &we, &they));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
