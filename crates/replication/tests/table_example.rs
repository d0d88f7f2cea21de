//! The example is a test too: it checks itself.

#[path = "../examples/table.rs"]
mod table;

#[test]
fn the_example_finds_its_table_whole() {
    table::main().expect("whole");
}
