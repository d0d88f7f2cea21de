//! With the feature `dpdk`: compiles the shim (`src/dpdk/shim.c`), because most of DPDK's interface
//! is inline functions. Without it: nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "dpdk")]
    dpdk::build();
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::process::Command;

    const SHIM: [&str; 3] = ["src/dpdk/shim.c", "src/dpdk/frames.c", "src/dpdk/gate.c"];
    const HEADERS: [&str; 2] = ["src/dpdk/frames.h", "src/dpdk/gate.h"];
    /// What the shim calls. Drivers of cards are plug-ins that DPDK loads itself.
    const LIBRARIES: &[&str] = &["rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"];

    pub fn build() {
        for file in SHIM.iter().chain(&HEADERS) {
            println!("cargo::rerun-if-changed={file}");
        }
        println!("cargo::rerun-if-env-changed=PKG_CONFIG_PATH");
        if let Err(why) = compile() {
            println!(
                "cargo::error=the feature `dpdk` needs DPDK 22.11 or later: {why}. Install libdpdk-dev and pkg-config \
                 (`make setup` does), or set PKG_CONFIG_PATH to where libdpdk.pc is."
            );
        }
    }

    fn ask(question: &str) -> Result<Vec<String>, String> {
        let output = Command::new("pkg-config")
            .args([question, "libdpdk"])
            .output()
            .map_err(|error| format!("pkg-config: {error}"))?;
        if !output.status.success() {
            let words = String::from_utf8_lossy(&output.stderr);
            return Err(words.trim().replace('\n', " "));
        }
        let words = String::from_utf8_lossy(&output.stdout);
        Ok(words.split_whitespace().map(str::to_owned).collect())
    }

    fn compile() -> Result<(), String> {
        let mut build = cc::Build::new();
        build.files(SHIM).warnings(true).extra_warnings(true);
        // DPDK's own headers do not compile without warnings.
        build.flag("-Wno-unused-parameter");
        // Pools over memory of one's own, and its mapping for cards, are in use since DPDK 20.
        build.define("ALLOW_EXPERIMENTAL_API", None);
        for flag in ask("--cflags")? {
            match flag.strip_prefix("-I") {
                Some(place) => build.flag("-isystem").flag(place),
                None => build.flag(flag),
            };
        }
        build
            .try_compile("cyclone_dpdk")
            .map_err(|error| error.to_string())?;
        for place in ask("--libs-only-L")? {
            println!(
                "cargo::rustc-link-search=native={}",
                place.trim_start_matches("-L")
            );
        }
        for library in LIBRARIES {
            println!("cargo::rustc-link-lib={library}");
        }
        Ok(())
    }
}
