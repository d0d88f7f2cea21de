//! x87's numbers against a C program that reads, adds and prints them with the processor itself.
//! Skipped where there is no C compiler or no x87.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use cyclone_test_support::Random;
use cyclone_wire::long_double::LongDouble;

/// Per line of two texts: what Redis' `string2ld` makes of each, their sum, and its text; `-` for
/// what is refused.
const PROGRAM: &str = r#"
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int parse(const char *text, long double *value) {
    char *end;
    errno = 0;
    *value = strtold(text, &end);
    return text[0] != 0 && !isspace((unsigned char)text[0]) && *end == 0 && !isnan(*value) &&
           !(errno == ERANGE && (isinf(*value) || fpclassify(*value) == FP_ZERO));
}

static void show(long double value) {
    unsigned char bytes[sizeof value];
    memcpy(bytes, &value, sizeof value);
    for (int at = 0; at < 10; at++) printf("%02x", bytes[at]);
    putchar(' ');
}

int main(void) {
    static char left_text[8192], right_text[8192];
    while (scanf("%8191s %8191s", left_text, right_text) == 2) {
        long double left, right;
        int ok = parse(left_text, &left), both = parse(right_text, &right) && ok;
        if (ok) show(left); else fputs("- ", stdout);
        if (!both || isnan(left + right)) { puts("- -"); continue; }
        long double sum = left + right;
        show(sum);
        if (isinf(sum)) { puts("-"); continue; }
        static char text[8192];
        int length = snprintf(text, sizeof text, "%.17Lf", sum);
        while (text[length - 1] == '0') length--;
        if (text[length - 1] == '.') length--;
        text[length] = 0;
        puts(strcmp(text, "-0") ? text : "0");
    }
    return 0;
}
"#;

fn digits(random: &mut Random, most: u64, radix: u32) -> String {
    let count = random.below(most + 1);
    let digit = |value: u64| char::from_digit(value as u32, radix).unwrap_or('0');
    (0..count)
        .map(|_| digit(random.below(u64::from(radix))))
        .collect()
}

/// A number, or nearly one.
fn number(random: &mut Random) -> String {
    let sign = ["", "", "-", "+"][random.below(4) as usize];
    let most = [3, 20, 40, 120, 2_000][random.below(5) as usize];
    let point = ["", ".", "."][random.below(3) as usize];
    let exponents = [3, 25, 70, 4_940, 20_000][random.below(5) as usize];
    let exponent_sign = ["", "-", "+"][random.below(3) as usize];
    let exponent = format!("{exponent_sign}{}", random.below(exponents));
    let body = match random.below(8) {
        0 => format!(
            "0x{}{point}{}",
            digits(random, most, 16),
            digits(random, 20, 16)
        ),
        1 => format!(
            "0X{}{point}{}p{exponent}",
            digits(random, 20, 16),
            digits(random, 20, 16)
        ),
        2 | 3 => format!(
            "{}{point}{}",
            digits(random, most, 10),
            digits(random, 20, 10)
        ),
        4 => format!(
            "{}",
            random.below(1 << 53) as f64 / (1u64 << random.below(54)) as f64
        ),
        5 => ["inf", "nan", "Infinity", "0", "1.5x", "0x1p-16445"][random.below(6) as usize].into(),
        _ => format!(
            "{}{point}{}E{exponent}",
            digits(random, most, 10),
            digits(random, 20, 10)
        ),
    };
    format!("{sign}{body}")
}

/// Two numbers that often lie near each other, or half-way between two others.
fn pair(random: &mut Random) -> (String, String) {
    let left = number(random);
    let right = match random.below(6) {
        0 => format!("-{}", left.trim_start_matches(['-', '+'])),
        1 => {
            // A 64-bit number, and one that touches its last bits.
            let exponent = random.below(32_700) as i64 - 16_445;
            let left = format!("0x{:x}p{exponent}", random.below(1 << 52) << 11 | 1);
            let right = format!(
                "-0x{:x}p{}",
                random.below(8) + 1,
                exponent - random.below(70) as i64
            );
            return (left, right);
        }
        _ => number(random),
    };
    (left, right)
}

fn hexadecimal(number: LongDouble) -> String {
    number
        .to_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn ours(left: &str, right: &str) -> String {
    let (left, right) = (
        LongDouble::parse(left.as_bytes()),
        LongDouble::parse(right.as_bytes()),
    );
    let sum = left.zip(right).and_then(|(left, right)| left.plus(right));
    let shown = |number: Option<LongDouble>| number.map_or_else(|| "-".to_owned(), hexadecimal);
    let text = sum
        .and_then(LongDouble::to_text)
        .unwrap_or_else(|| "-".to_owned());
    format!("{} {} {text}", shown(left), shown(sum))
}

#[test]
fn reads_adds_and_prints_as_the_processor_does() {
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("skipped: no x87, or another C library");
        return;
    }
    let directory =
        std::env::temp_dir().join(format!("cyclone-long-double-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let (source, program) = (directory.join("judge.c"), directory.join("judge"));
    fs::write(&source, PROGRAM).expect("the source");
    let compiled = Command::new("cc")
        .arg("-O1")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no C compiler");
        return;
    }
    let count = std::env::var("CYCLONE_PAIRS")
        .ok()
        .and_then(|count| count.parse().ok());
    let mut random = Random::new(0x5eed_0010_0dd5_eed1);
    let pairs: Vec<_> = (0..count.unwrap_or(10_000))
        .map(|_| pair(&mut random))
        // The program reads words.
        .filter(|(left, right)| !left.is_empty() && !right.is_empty())
        .collect();
    let mut judge = Command::new(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut input = judge.stdin.take().expect("its input");
    let lines: String = pairs
        .iter()
        .map(|(left, right)| format!("{left} {right}\n"))
        .collect();
    let writer = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let output = judge.wait_with_output().expect("its output");
    writer.join().expect("no panic").expect("it reads all");
    fs::remove_dir_all(&directory).expect("removed");
    let output = String::from_utf8(output.stdout).expect("plain text");
    let answers: Vec<_> = output.lines().collect();
    assert_eq!(answers.len(), pairs.len());
    for ((left, right), answer) in pairs.iter().zip(answers) {
        assert_eq!(ours(left, right), answer, "{left} + {right}");
    }
}
