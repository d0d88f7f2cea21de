//! Rows of results: as aligned text, as CSV, as JSON objects.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

/// A table whose columns are fixed from the start.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<&'static str>,
    rows: Vec<Vec<Value>>,
}

impl Table {
    /// An empty table.
    pub fn new(columns: &[&'static str]) -> Table {
        Table {
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row with one value per column; `Null` prints as nothing.
    ///
    /// # Panics
    /// If the number of values is not the number of columns: a mistake in the program.
    pub fn add(&mut self, row: Vec<Value>) {
        assert_eq!(row.len(), self.columns.len(), "columns {:?}", self.columns);
        self.rows.push(row);
    }

    /// Each row as a JSON object, without the columns that are `Null`.
    pub fn rows_json(&self) -> Vec<Value> {
        let object = |row: &Vec<Value>| {
            let pairs = self.columns.iter().zip(row);
            let object: Map<_, _> = pairs
                .filter(|(_, value)| !value.is_null())
                .map(|(column, value)| ((*column).to_owned(), value.clone()))
                .collect();
            Value::Object(object)
        };
        self.rows.iter().map(object).collect()
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// As CSV (RFC 4180, with line feeds).
    pub fn csv(&self) -> String {
        let mut text = self.columns.join(",");
        text.push('\n');
        for row in &self.rows {
            let cells: Vec<String> = row.iter().map(|value| quoted(&plain(value))).collect();
            text.push_str(&cells.join(","));
            text.push('\n');
        }
        text
    }

    /// Writes it as CSV.
    pub fn write_csv(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.csv()).with_context(|| format!("writing {}", path.display()))
    }

    /// The heading, and every row, aligned.
    pub fn text(&self) -> String {
        let cells: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| row.iter().map(plain).collect())
            .collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                let widest = cells.iter().map(|row| row[column].chars().count()).max();
                widest.unwrap_or(0).max(self.columns[column].len())
            })
            .collect();
        let mut text = String::new();
        let heading = self.columns.iter().map(|name| (*name).to_owned()).collect();
        for (number, row) in std::iter::once(heading).chain(cells).enumerate() {
            for (column, cell) in row.iter().enumerate() {
                let numeric = number > 0 && self.rows[number - 1][column].is_number();
                // Writing to a String does not fail.
                let _ = if numeric || number == 0 && self.numeric(column) {
                    write!(text, "{cell:>width$}  ", width = widths[column])
                } else {
                    write!(text, "{cell:<width$}  ", width = widths[column])
                };
            }
            let kept = text.trim_end().len();
            text.truncate(kept);
            text.push('\n');
        }
        text
    }

    fn numeric(&self, column: usize) -> bool {
        self.rows.iter().any(|row| row[column].is_number())
    }
}

/// A float rounded to so many digits behind the point; not a number becomes nothing.
pub fn rounded(value: f64, digits: i32) -> Value {
    let scale = 10f64.powi(digits);
    Value::from((value * scale).round() / scale)
}

fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", cell.replace('"', "\"\""))
    } else {
        cell.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_that_need_quotes_get_them_and_nulls_are_empty() {
        let mut table = Table::new(&["name", "value"]);
        table.add(vec!["plain".into(), rounded(1.23456, 2)]);
        table.add(vec!["a, \"b\"".into(), Value::Null]);
        table.add(vec!["nan".into(), rounded(f64::NAN, 2)]);
        assert_eq!(
            table.csv(),
            "name,value\nplain,1.23\n\"a, \"\"b\"\"\",\nnan,\n"
        );
        assert_eq!(table.rows_json()[2], serde_json::json!({"name": "nan"}));
        let text = table.text();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("name    value"));
        assert_eq!(lines.next(), Some("plain    1.23"));
    }
}
