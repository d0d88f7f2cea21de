//! What the programs `cyclone` and `cyclone-bench` share: how each of them ends, and how one finds
//! the other.

use std::any::Any;
use std::ffi::OsStr;
use std::panic::{UnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error_text::error_text;

/// The program that runs nodes, and everything that an operator needs.
pub const CYCLONE: &str = "cyclone";
/// The program that measures.
pub const CYCLONE_BENCH: &str = "cyclone-bench";

/// Runs a program. `name` stands before its errors.
pub fn run(name: &str, body: impl FnOnce() -> Result<()> + UnwindSafe) -> ExitCode {
    end_with_reader();
    // Unwinding ends what was started: nodes, directories in memory.
    match catch_unwind(body) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("{name}: {}", error_text(&error));
            ExitCode::FAILURE
        }
        Err(panic) if has_lost_reader(panic_text(&*panic)) => ExitCode::from(ENDED_WITH_READER),
        Err(panic) => resume_unwind(panic),
    }
}

/// Reads a program's command line, or ends the program. Of a subcommand that does not exist the
/// error names those that do.
pub fn parse<C: Parser>() -> C {
    C::try_parse().unwrap_or_else(|error| with_known_names::<C>(error, std::env::args()).exit())
}

fn with_known_names<C: Parser>(
    mut error: clap::Error,
    arguments: impl Iterator<Item = String>,
) -> clap::Error {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return error;
    }
    let top = C::command();
    let mut command = &top;
    for argument in arguments.skip(1) {
        match command.find_subcommand(&argument) {
            Some(below) => command = below,
            None if argument.starts_with('-') => {}
            None => break,
        }
    }
    let shown = command.get_subcommands().filter(|it| !it.is_hide_set());
    let names: Vec<&str> = shown.map(clap::Command::get_name).collect();
    let known = format!("there are: {}", names.join(", "));
    error.insert(
        ContextKind::Suggested,
        ContextValue::StyledStrs(vec![known.into()]),
    );
    error
}

/// The file of a program that is installed with this one: beside it, or on the path.
///
/// # Errors
/// When it is in neither place; the message names both.
pub fn find(name: &str) -> Result<PathBuf> {
    let this = std::env::current_exe().context("own executable")?;
    let directory = this.parent().context("own executable")?;
    // Cargo puts tests in a directory below that of the programs.
    let directory = match directory.file_name() == Some(OsStr::new("deps")) {
        true => directory.parent().unwrap_or(directory),
        false => directory,
    };
    let beside = directory.join(name);
    if beside.is_file() {
        return Ok(beside);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path)
        .filter(|directory| directory.is_absolute())
        .map(|directory| directory.join(name))
        .find(|file| is_executable(file));
    match on_path {
        Some(file) => Ok(file),
        None => bail!(
            "the program {name} is neither {} nor in a directory of PATH; `make build` builds cyclone and cyclone-bench, which belong in one directory",
            beside.display()
        ),
    }
}

fn is_executable(file: &Path) -> bool {
    file.is_file() && rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok()
}

/// As a shell reports a program that SIGPIPE has ended.
const ENDED_WITH_READER: u8 = 128 + signal_hook::consts::SIGPIPE as u8;

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

/// Whether a panic says that the reader of the output is gone.
fn has_lost_reader(text: &str) -> bool {
    let printing = ["failed printing to stdout", "failed printing to stderr"];
    printing.iter().any(|it| text.starts_with(it)) && text.contains("Broken pipe")
}

/// What prints ends quietly when the reader is gone, as in `cyclone ctl status | head -1`. SIGPIPE
/// stays ignored: with its usual effect a node that ends a connection would end this program as
/// well, without a word. A node prints nothing but its log, which does without a reader.
fn end_with_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !has_lost_reader(panic.payload_as_str().unwrap_or_default()) {
            usual(panic);
        }
    }));
}
