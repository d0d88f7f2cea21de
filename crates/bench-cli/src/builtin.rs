//! The plans of plans/, in the program: so that they can be run wherever it is.

macro_rules! plans {
    ($($name:literal,)*) => {
        &[$(($name, include_str!(concat!("../../../plans/", $name, ".toml")))),*]
    };
}

/// Name and text of each, in the order of the names.
pub const PLANS: &[(&str, &str)] = plans![
    "fig01",
    "fig08",
    "fig09",
    "fig10",
    "fig11",
    "fig12",
    "fig13",
    "fig14",
    "fig14-large",
    "fig15",
    "fig16",
    "fig17",
    "fig18",
    "fig19",
    "fig20",
    "flash",
    "logs",
    "open",
    "peers",
    "peers-reads",
    "rowan-fig09",
    "rowan-fig09-writes",
    "rowan-fig16",
    "rowan-fig16-large",
    "ycsb-a",
    "ycsb-b",
    "ycsb-c",
    "ycsb-d",
    "ycsb-e",
    "ycsb-f",
];

/// A plan's text by name.
pub fn find(name: &str) -> Option<&'static str> {
    PLANS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_of_the_directory_is_in_the_program() {
        // Cargo runs tests in their package's directory. (The path known at compile time may be
        // another checkout's.)
        let directory = std::path::Path::new("../../plans");
        let mut names: Vec<String> = std::fs::read_dir(directory)
            .expect("plans")
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .filter_map(|name| name.strip_suffix(".toml").map(str::to_owned))
            .collect();
        names.sort();
        let known: Vec<&str> = PLANS.iter().map(|(name, _)| *name).collect();
        assert_eq!(known, names);
    }
}
