//! The commands that documents print are commands of `cyclone`, and after `bench` those of
//! `cyclone-bench`: subcommands, options and values are taken as printed.

use std::path::{Path, PathBuf};
use std::process::Command;

use cyclone::program;
use cyclone_wire::format_version::FormatVersion;

/// Subcommands that a reader may type.
const SUBCOMMANDS: [&str; 5] = ["serve", "demo", "ctl", "log", "bench"];

/// README.md and all pages of docs, of the checkout that the tests run in.
fn pages() -> Vec<PathBuf> {
    // Cargo runs tests in their package's directory.
    let root = Path::new("../..");
    let mut pages = vec![root.join("README.md"), root.join("deploy/README.md")];
    for entry in std::fs::read_dir(root.join("docs")).expect("docs") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|end| end == "md") {
            pages.push(path);
        }
    }
    pages.sort();
    pages
}

/// What stands between backticks in a line, and the lines of fenced blocks.
fn code(page: &str) -> Vec<String> {
    let (mut found, mut prose, mut is_fenced) = (Vec::new(), String::new(), false);
    for line in page.replace("\\\n", " ").lines() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if is_fenced {
            found.push(line.trim().trim_start_matches("$ ").to_owned());
        } else {
            prose.push_str(line.trim());
            prose.push(' ');
        }
    }
    found.extend(prose.split('`').skip(1).step_by(2).map(str::to_owned));
    found
}

/// The arguments of a line that calls the program, without what only the shell reads.
fn arguments(line: &str) -> Option<Vec<String>> {
    let line = line.strip_prefix("target/release/").unwrap_or(line);
    let line = line.strip_prefix("cyclone ")?;
    let end = [" #", " | ", " && ", " > ", " >> ", " < "];
    let end = end.iter().filter_map(|it| line.find(it)).min();
    let line = &line[..end.unwrap_or(line.len())];
    // What may be left out is there.
    let line = line.replace(['[', ']'], " ");
    let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let is_command = words
        .first()
        .is_some_and(|it| SUBCOMMANDS.contains(&it.as_str()));
    (is_command && !line.contains('…')).then_some(words)
}

/// A value in place of a word such as `DIRECTORY`.
fn filled(word: &str) -> String {
    let is_placeholder = word.chars().all(|c| c.is_ascii_uppercase() || c == '_');
    match word {
        "HOST:PORT" => "127.0.0.1:1".to_owned(),
        // Any benchmark.
        "NAME" => "put".to_owned(),
        _ if is_placeholder => "1".to_owned(),
        _ => word.to_owned(),
    }
}

/// All commands that a line with words such as `list|show` stands for.
fn alternatives(words: &[String]) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    for word in words {
        let choices: Vec<String> = word.split('|').map(filled).collect();
        let longer = |of: &Vec<String>| {
            let with = |choice: &String| [of.as_slice(), std::slice::from_ref(choice)].concat();
            choices.iter().map(with).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

#[test]
fn printed_commands_are_taken() {
    let cyclone = program::find(program::CYCLONE).expect("built");
    let (mut checked, mut wrong) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).expect("a page");
        for line in code(&text) {
            let words = arguments(&line).unwrap_or_default();
            if words.is_empty() {
                continue;
            }
            for command in alternatives(&words) {
                // An unknown option, or a value that an option does not take, is refused before
                // help is given.
                let output = Command::new(&cyclone)
                    .args(&command)
                    .arg("--help")
                    .output()
                    .expect("the program runs");
                checked += 1;
                if !output.status.success() {
                    let why = String::from_utf8_lossy(&output.stderr).into_owned();
                    let why = why.lines().next().unwrap_or_default().to_owned();
                    wrong.push(format!("{}: {}: {why}", page.display(), command.join(" ")));
                }
            }
        }
    }
    assert!(checked > 50, "{checked} commands");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Each release has its commit and the version of its formats, which this program supports, and has
/// left images of them.
#[test]
fn releases_name_format_versions_that_are_supported() {
    let text = std::fs::read_to_string("../../docs/releases.toml").expect("releases");
    let releases: toml::Table = toml::from_str(&text).expect("TOML");
    let releases = releases["release"].as_array().expect("a list");
    let mut before = (String::new(), 0);
    for release in releases {
        let field = |name: &str| release[name].as_str().expect("text").to_owned();
        let version = field("version");
        let commit = field("commit");
        let is_hash = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
        assert!(is_hash, "{version}: commit {commit:?}");
        let format = release["format_version"].as_integer().expect("a number");
        let number = u32::try_from(format).expect("a version");
        let known = FormatVersion::new(number).expect("a version");
        assert!(
            known <= FormatVersion::CURRENT,
            "{version}: format version {known}"
        );
        let now = (field("date"), number);
        assert!(before <= now, "{version} stands before an older release");
        before = now;
        let images = Path::new("../server/tests/images").join(&version);
        assert!(
            images.is_dir(),
            "{} is missing: make images",
            images.display()
        );
    }
    assert!(!releases.is_empty());
}
