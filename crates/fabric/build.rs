//! With the feature `libfabric`: bindings of libfabric's headers, whose calls are mostly `static
//! inline` and are therefore wrapped in separate C functions. Without it: nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "libfabric")]
    libfabric::bind();
}

#[cfg(feature = "libfabric")]
mod libfabric {
    use std::env;
    use std::path::{Path, PathBuf};

    const HEADERS: &[&str] = &[
        "fabric.h",
        "fi_errno.h",
        "fi_domain.h",
        "fi_endpoint.h",
        "fi_cm.h",
        "fi_eq.h",
        "fi_rma.h",
        "fi_atomic.h",
        "fi_tagged.h",
        "fi_trigger.h",
    ];

    /// Where distributions, source builds and AWS's EFA installer put the headers.
    const PLACES: &[&str] = &[
        "/usr/include",
        "/usr/local/include",
        "/opt/amazon/efa/include",
    ];

    pub fn bind() {
        println!("cargo::rerun-if-env-changed=LIBFABRIC_PREFIX");
        let Some(include) = include_directory() else {
            println!(
                "cargo::error=the feature `libfabric` needs libfabric's headers: no rdma/fabric.h in {PLACES:?}. \
                 Install libfabric-dev (`make setup` does), or set LIBFABRIC_PREFIX to where include/ and lib/ are."
            );
            return;
        };
        if let Err(why) = generate(&include) {
            println!(
                "cargo::error=bindings of libfabric in {}: {why}",
                include.display()
            );
        }
    }

    fn include_directory() -> Option<PathBuf> {
        let has = |place: &PathBuf| place.join("rdma/fabric.h").is_file();
        if let Some(prefix) = env::var_os("LIBFABRIC_PREFIX") {
            let prefix = PathBuf::from(prefix);
            println!(
                "cargo::rustc-link-search=native={}",
                prefix.join("lib").display()
            );
            return Some(prefix.join("include")).filter(has);
        }
        PLACES.iter().map(PathBuf::from).find(has)
    }

    fn generate(include: &Path) -> Result<(), String> {
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo set no OUT_DIR")?);
        let lines = HEADERS
            .iter()
            .map(|name| format!("#include <rdma/{name}>\n"));
        let header = out.join("libfabric.h");
        std::fs::write(&header, lines.collect::<String>()).map_err(|e| e.to_string())?;

        let wrappers = out.join("libfabric_wrappers");
        bindgen::Builder::default()
            .header(header.to_string_lossy())
            .clang_arg(format!("-I{}", include.display()))
            .allowlist_function("fi_.*")
            .allowlist_type("fi_.*|fid_.*")
            .allowlist_var("FI_.*")
            .wrap_static_fns(true)
            .wrap_static_fns_path(&wrappers)
            .prepend_enum_name(false)
            .derive_debug(false)
            .layout_tests(false)
            .generate_comments(false)
            .generate()
            .map_err(|e| e.to_string())?
            .write_to_file(out.join("libfabric.rs"))
            .map_err(|e| e.to_string())?;

        cc::Build::new()
            .file(wrappers.with_extension("c"))
            .include(include)
            .warnings(false)
            .try_compile("cyclone_libfabric_wrappers")
            .map_err(|e| e.to_string())?;
        println!("cargo::rustc-link-lib=fabric");
        Ok(())
    }
}
