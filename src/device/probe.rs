//! What this machine is, from what the system says of it.

use serde::Serialize;

use super::Target;

/// This machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// As `std` names the architecture.
    pub architecture: &'static str,
    /// Those of its processor's features that a choice depends on.
    pub features: Vec<&'static str>,
    /// Memory that a process may use: that of the machine, or less where a control group says so.
    pub memory_bytes: Option<u64>,
    #[serde(skip)]
    target: Option<Target>,
}

/// Features that a choice depends on, as Linux spells them.
const FEATURES: [&str; 8] =
    ["avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"];

impl Machine {
    /// Looks at this machine. What cannot be read is left out.
    pub fn probe() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Self::new(
            std::env::consts::ARCH,
            &read("/proc/cpuinfo"),
            &read("/proc/meminfo"),
            &read("/sys/fs/cgroup/memory.max"),
        )
    }

    fn new(architecture: &'static str, cpuinfo: &str, meminfo: &str, limit: &str) -> Self {
        let features = features(cpuinfo);
        let has = |name: &str| features.contains(&name);
        let target = match architecture {
            "aarch64" => Some(Target::Arm64),
            // Tiles alone multiply nothing: one of the two products belongs to them.
            "x86_64" if has("amx_tile") && (has("amx_bf16") || has("amx_int8")) => Some(Target::X86Amx),
            "x86_64" if has("avx512f") && has("avx512bw") && has("avx512_vnni") => Some(Target::X86Vnni),
            "x86_64" if has("avx512f") && has("avx512bw") => Some(Target::X86Avx512),
            "x86_64" if has("avx2") => Some(Target::X86Avx2),
            _ => None,
        };
        let limit = limit.trim().parse().ok();
        let memory_bytes = match (memory(meminfo), limit) {
            (Some(all), Some(limit)) => Some(all.min(limit)),
            (all, limit) => all.or(limit),
        };
        Self { architecture, features, memory_bytes, target }
    }

    /// What kind of machine it is; `None` where the processor is none that a row of the table is for.
    pub fn target(&self) -> Option<Target> {
        self.target
    }
}

/// Those of [`FEATURES`] that the first processor has.
fn features(cpuinfo: &str) -> Vec<&'static str> {
    let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == "flags"));
    let flags: Vec<_> =
        line.and_then(|l| l.split_once(':')).map_or("", |(_, flags)| flags).split_whitespace().collect();
    FEATURES.into_iter().filter(|feature| flags.contains(feature)).collect()
}

/// `MemTotal`, which is in units of 1024 bytes.
fn memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(architecture: &'static str, flags: &str) -> Option<Target> {
        let cpuinfo = format!(
            "processor\t: 0\nvmx flags\t: amx_tile amx_int8\nflags\t\t: fpu {flags} xsave\n\nprocessor\t: 1\n"
        );
        Machine::new(architecture, &cpuinfo, "", "").target()
    }

    #[test]
    fn flags_make_the_target() {
        let avx512 = "avx2 avx512f avx512bw";
        for (flags, target) in [
            ("avx2 avx512f avx512bw avx512_vnni amx_tile amx_int8", Some(Target::X86Amx)),
            ("avx2 avx512f avx512bw avx512_vnni amx_bf16 amx_tile", Some(Target::X86Amx)),
            // Tiles without a product.
            ("avx2 avx512f avx512bw avx512_vnni amx_tile", Some(Target::X86Vnni)),
            ("avx2 avx512f avx512bw avx512_vnni", Some(Target::X86Vnni)),
            (avx512, Some(Target::X86Avx512)),
            ("avx2 avx_vnni", Some(Target::X86Avx2)),
            ("avx2", Some(Target::X86Avx2)),
            // Flags are words: avx512_vnni is not avx512_vnni2, and avx is not avx2.
            ("avx avx2x", None),
            ("sse4_2", None),
        ] {
            assert_eq!(on("x86_64", flags), target, "{flags}");
        }
        assert_eq!(on("aarch64", ""), Some(Target::Arm64));
        assert_eq!(on("riscv64", "avx2"), None);
    }

    #[test]
    fn memory_is_what_a_process_may_use() {
        let memory = |meminfo: &str, limit: &str| Machine::new("x86_64", "", meminfo, limit).memory_bytes;
        let four_gib = "MemTotal:        4194304 kB\nMemFree:          100000 kB\n";
        assert_eq!(memory(four_gib, "max\n"), Some(4 << 30));
        assert_eq!(memory(four_gib, "1073741824\n"), Some(1 << 30));
        assert_eq!(memory(four_gib, "9223372036854771712\n"), Some(4 << 30));
        assert_eq!(memory("", "1073741824"), Some(1 << 30));
        assert_eq!(memory("MemTotal: lots", ""), None);
    }
}
