use super::*;

fn sum(left: &str, right: &str) -> Option<String> {
    let left = LongDouble::parse(left.as_bytes())?;
    let right = LongDouble::parse(right.as_bytes())?;
    left.plus(right)?.to_text()
}

fn text(number: &str) -> Option<String> {
    LongDouble::parse(number.as_bytes())?.to_text()
}

#[test]
fn everyday_sums_are_printed_without_surprise() {
    for (left, right, expected) in [
        ("10.50", "0.1", "10.6"),
        ("5.0e3", "2.0e2", "5200"),
        ("0.1", "0.2", "0.3"),
        ("3", "-3.0", "0"),
        ("-1.5", "0.25", "-1.25"),
        ("0.1", "1e-20", "0.1"),
        ("1e20", "1", "100000000000000000000"),
        ("9223372036854775807", "1", "9223372036854775808"),
        ("17179869184", "1.5", "17179869185.5"),
        ("3.0", "1.1", "4.1"),
    ] {
        assert_eq!(
            sum(left, right).as_deref(),
            Some(expected),
            "{left} + {right}"
        );
    }
}

#[test]
fn what_is_no_number_is_refused() {
    for wrong in [
        "",
        " 1",
        "1 ",
        "abc",
        "nan",
        "-nan",
        ".",
        "+",
        "-",
        "1e",
        "1e+",
        "0x",
        "0x.",
        "0x1p",
        "1..2",
        "1_0",
        "--1",
        "1e5000",
        "-1e5000",
        "1e-5000",
        "0x1p16384",
        "0x1p-16446",
        "1\0",
        "infinit",
    ] {
        assert_eq!(LongDouble::parse(wrong.as_bytes()), None, "{wrong:?}");
    }
    assert_eq!(LongDouble::parse(&[b'1'; 5120]), None);
    let long = [b'0'; 5119];
    assert_eq!(LongDouble::parse(&long), Some(LongDouble::ZERO));
}

#[test]
fn the_ends_of_the_range_are_read() {
    // The largest number, and the smallest above zero.
    let largest = "0xffffffffffffffffp16320";
    assert_eq!(text(largest).map(|text| text.len()), Some(4933));
    assert_eq!(sum(largest, largest), None);
    assert_eq!(text("1.18973149535723176502e4932"), text(largest));
    assert_eq!(LongDouble::parse(b"1.18973149535723176509e4932"), None);
    let smallest = LongDouble::parse(b"0x1p-16445").expect("a number");
    assert_eq!(LongDouble::parse(b"3.6e-4951"), Some(smallest));
    assert_eq!(LongDouble::parse(b"1.8e-4951"), None);
    assert_eq!(LongDouble::parse(b"1.9e-4951"), Some(smallest));
    assert_eq!(smallest.to_text().as_deref(), Some("0"));
    assert_eq!(text("-0").as_deref(), Some("0"));
}

#[test]
fn infinite_numbers_add_up_or_not() {
    let parse = |text: &str| LongDouble::parse(text.as_bytes()).expect("a number");
    assert!(!parse("Infinity").is_finite());
    assert_eq!(parse("inf").plus(parse("1")), Some(parse("inf")));
    assert_eq!(parse("inf").plus(parse("-inf")), None);
    assert_eq!(parse("-inf").to_text(), None);
}

#[test]
fn stored_bytes_are_those_of_an_x87() {
    for (number, bytes) in [
        ("0", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("-0", [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80]),
        ("1", [0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f]),
        ("-2.5", [0, 0, 0, 0, 0, 0, 0, 0xa0, 0, 0xc0]),
        ("0x1p-16445", [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("0x1p-16382", [0, 0, 0, 0, 0, 0, 0, 0x80, 1, 0]),
        ("inf", [0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x7f]),
    ] {
        let parsed = LongDouble::parse(number.as_bytes()).expect("a number");
        assert_eq!(parsed.to_bytes(), bytes, "{number}");
        assert_eq!(LongDouble::from_bytes(bytes), Some(parsed), "{number}");
    }
    // NaN, and what no x87 stores.
    for wrong in [
        [1, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x7f],
        [0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0x7f],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0x80, 0, 0],
    ] {
        assert_eq!(LongDouble::from_bytes(wrong), None, "{wrong:?}");
    }
}
