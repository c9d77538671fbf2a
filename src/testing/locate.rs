//! Where a server's binaries are.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    StartError,
    fetch::{self, Way},
    process::Identity,
};

/// Folders of installed versions: the parent, how an entry begins, what follows it. The version is the rest
/// of the entry's name.
const USUAL: [(&str, &str, &str); 6] = [
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/opt/homebrew/opt", "postgresql@", "bin"),
    ("/usr/local/opt", "postgresql@", "bin"),
    ("/home/linuxbrew/.linuxbrew/opt", "postgresql@", "bin"),
    ("/Applications/Postgres.app/Contents/Versions", "", "bin"),
];

/// What `FENCEPOST_PG_FETCH` says.
enum Fetch {
    WhenNoneIsFound,
    Never,
    Only(&'static [Way]),
}

/// The folder that holds `initdb` and `postgres`.
pub(super) fn bin_dir(identity: Identity) -> Result<PathBuf, StartError> {
    if let Some(folder) = env::var_os("PG_BIN").filter(|value| !value.is_empty()) {
        let folder = PathBuf::from(folder);
        return holds_server(&folder).ok_or_else(|| StartError::Environment {
            variable: "PG_BIN",
            problem: format!("the folder {} does not hold both `initdb` and `postgres`", folder.display()),
        });
    }
    let mut looked = vec!["  PG_BIN: not set".to_owned()];
    let ways = match fetch_setting()? {
        Fetch::Only(ways) => {
            looked.push("  PATH, pg_config and the usual folders: skipped by FENCEPOST_PG_FETCH".to_owned());
            ways
        }
        setting => {
            if let Some(found) = installed(&mut looked) {
                return Ok(found);
            }
            if matches!(setting, Fetch::Never) {
                looked.push("  fetching: switched off by FENCEPOST_PG_FETCH".to_owned());
                return Err(not_found(&looked));
            }
            Way::ALL
        }
    };
    fetch::bin_dir(ways, identity).map_err(|problems| {
        looked.extend(problems.into_iter().map(|problem| format!("  fetching: {problem}")));
        not_found(&looked)
    })
}

fn fetch_setting() -> Result<Fetch, StartError> {
    match env::var("FENCEPOST_PG_FETCH").as_deref() {
        Err(env::VarError::NotPresent) | Ok("") => Ok(Fetch::WhenNoneIsFound),
        Ok("0") => Ok(Fetch::Never),
        Ok("1") => Ok(Fetch::Only(Way::ALL)),
        Ok("npm") => Ok(Fetch::Only(&[Way::Npm])),
        Ok("pip") => Ok(Fetch::Only(&[Way::Pip])),
        _ => Err(StartError::Environment {
            variable: "FENCEPOST_PG_FETCH",
            problem: "must be `0`, `1`, `npm` or `pip`".to_owned(),
        }),
    }
}

fn installed(looked: &mut Vec<String>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(found) = env::split_paths(&path).find_map(|folder| holds_server(&folder)) {
        return Some(found);
    }
    looked.push(format!("  PATH: {}", path.to_string_lossy()));

    match pg_config() {
        Some(folder) => {
            if let Some(found) = holds_server(&folder) {
                return Some(found);
            }
            // The development package alone brings pg_config, without a server.
            looked.push(format!("  pg_config --bindir: {} has no server", folder.display()));
        }
        None => looked.push("  pg_config: not found".to_owned()),
    }

    if let Some(found) = usual_folders().iter().find_map(|folder| holds_server(folder)) {
        return Some(found);
    }
    let patterns = USUAL.map(|(parent, start, end)| format!("{parent}/{start}*/{end}"));
    looked.push(format!("  usual folders: {}", patterns.join(", ")));
    None
}

/// The folder itself, or the one its `initdb` leads to when that one is complete: tools like `psql` and
/// `pg_basebackup` are next to the file, not always next to a link to it.
fn holds_server(folder: &Path) -> Option<PathBuf> {
    let complete = |folder: &Path| folder.join("initdb").is_file() && folder.join("postgres").is_file();
    if !complete(folder) {
        return None;
    }
    let absolute = folder.canonicalize().ok()?;
    let real = absolute.join("initdb").canonicalize().ok()?.parent().map(Path::to_path_buf);
    Some(real.filter(|real| complete(real)).unwrap_or(absolute))
}

fn pg_config() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").stdin(Stdio::null()).output().ok()?;
    let folder = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !folder.is_empty()).then(|| folder.into())
}

/// Newest version first.
fn usual_folders() -> Vec<PathBuf> {
    let mut found: Vec<(Vec<u32>, PathBuf)> = Vec::new();
    for (parent, start, end) in USUAL {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if let Some(version) = name.to_string_lossy().strip_prefix(start) {
                found.push((numeric(version), entry.path().join(end)));
            }
        }
    }
    found.sort_by(|(left, _), (right, _)| right.cmp(left));
    found.into_iter().map(|(_, folder)| folder).collect()
}

/// By number, since by text 9.6 would come before 17.
fn numeric(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

fn not_found(looked: &[String]) -> StartError {
    let has = |program: &str| {
        env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .any(|folder| folder.join(program).is_file())
    };
    let install = if cfg!(target_os = "macos") {
        "brew install postgresql@17"
    } else if has("apt-get") {
        "apt-get install -y --no-install-recommends postgresql"
    } else if has("dnf") {
        "dnf install -y postgresql-server"
    } else if has("apk") {
        "apk add postgresql"
    } else {
        "install your system's package of the PostgreSQL server, or set PG_BIN or DATABASE_URL"
    };
    StartError::NotFound { looked: looked.join("\n"), install }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_by_number() {
        assert!(numeric("17") > numeric("9.6"));
        assert!(numeric("16") < numeric("16.2"));
        assert!(numeric("latest") < numeric("9.6"));
    }
}
