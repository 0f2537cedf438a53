//! The way into another program that ends when this one does.

use std::os::unix::process::CommandExt;

/// The word by which a program knows that it is only the way into another.
pub(crate) const WORD: &str = "__toolgate_child";

/// Where this program was started to lead into another one: does so, and never comes back. The other one is told to end when
/// the process that started it is gone, however that went.
pub fn enter_if_asked() {
    let mut words = std::env::args_os().skip(1);
    if words.next().as_deref() != Some(WORD.as_ref()) {
        return;
    }
    let (Some(parent), Some(program)) = (words.next(), words.next()) else { std::process::exit(127) };
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    // Whoever started this may be gone already, and would not be missed.
    let now = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    if now.as_deref() != parent.to_str() {
        std::process::exit(127);
    }
    let error = std::process::Command::new(&program).args(words).exec();
    // Nobody else can say it.
    #[expect(clippy::print_stderr, reason = "standard error is where an upstream speaks")]
    {
        eprintln!("`{}` cannot be started: {error}", program.display());
    }
    std::process::exit(127);
}
