//! Runs a program with a hand on its system calls: counts those that change files, and puts a fault in
//! the way of one of them.
//!
//! By ptrace, since the program's own calls are what is meant: a preloaded library sees only those that go
//! through libc, and renaming with flags does not. Every stop is of one thread; all threads of the program
//! are followed.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs::File;
use std::io::{Error, Read, Result, Seek};
use std::os::unix::process::CommandExt;
use std::process::Command;

use libc::{c_int, c_long, c_void, pid_t};

/// What a watched call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Puts bytes into a file.
    Write,
    /// Makes a file or directory.
    Create,
    /// Waits until something is on disk.
    Sync,
    /// Renames.
    Rename,
    /// Removes a file or directory.
    Remove,
}

/// What happens at a watched call, before it is made.
#[derive(Clone, Copy)]
pub enum Fault<'a> {
    /// The program is killed.
    Kill,
    /// The call fails with this error number and does nothing, and so does every later one of its kind.
    Fail(i32),
    /// The program gets this signal.
    Signal(i32),
    /// Something else happens to the files; the call goes on.
    Meanwhile(&'a dyn Fn()),
}

/// How a traced run went.
#[derive(Debug)]
pub struct Traced {
    /// Exit code, or the signal that ended it.
    pub ended: std::result::Result<i32, i32>,
    /// What was said on stderr.
    pub stderr: String,
    /// The watched calls, in order.
    pub calls: Vec<Kind>,
}

/// Runs `command` to its end, with a fault at the watched call of this number, counted from 0.
///
/// # Errors
/// When the program cannot be started or traced.
pub fn run(command: &mut Command, fault: Option<(usize, Fault<'_>)>) -> Result<Traced> {
    let mut stderr = tempfile::tempfile()?;
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    command.stderr(stderr.try_clone()?);
    // SAFETY: between fork and exec only an async-signal-safe call is made.
    unsafe { command.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0, std::ptr::null_mut()).map(drop)) };
    let leader = pid_t::try_from(command.spawn()?.id()).map_err(Error::other)?;
    // The stop after exec.
    wait(leader)?;
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
    ptrace(libc::PTRACE_SETOPTIONS, leader, 0, options as usize as *mut c_void)?;
    go_on(leader, 0);
    let mut tracer = Tracer { leader, fault, calls: Vec::new(), failing: HashMap::new(), broken: None };
    let ended = tracer.follow()?;
    Ok(Traced { ended, stderr: content(&mut stderr)?, calls: tracer.calls })
}

fn content(file: &mut File) -> Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

struct Tracer<'a> {
    leader: pid_t,
    fault: Option<(usize, Fault<'a>)>,
    calls: Vec<Kind>,
    /// Threads inside a call that is to fail, with the error number.
    failing: HashMap<pid_t, i32>,
    /// The kind of call that fails from now on.
    broken: Option<(Kind, i32)>,
}

impl Tracer<'_> {
    /// Follows all threads until the program ends.
    fn follow(&mut self) -> Result<std::result::Result<i32, i32>> {
        loop {
            // Only this thread's: other tests have children, too.
            let (pid, status) = wait(-1)?;
            if libc::WIFEXITED(status) && pid == self.leader {
                return Ok(Ok(libc::WEXITSTATUS(status)));
            }
            if libc::WIFSIGNALED(status) && pid == self.leader {
                return Ok(Err(libc::WTERMSIG(status)));
            }
            if !libc::WIFSTOPPED(status) {
                continue;
            }
            let signal = libc::WSTOPSIG(status);
            let event = status >> 16 != 0;
            let deliver = match signal {
                _ if signal == libc::SIGTRAP | 0x80 => {
                    self.call(pid);
                    0
                }
                // A thread was made, or begins.
                libc::SIGTRAP | libc::SIGSTOP => 0,
                _ if event => 0,
                signal => signal,
            };
            go_on(pid, deliver);
        }
    }

    /// A thread enters or leaves a system call. One that has been killed meanwhile has no registers.
    fn call(&mut self, pid: pid_t) {
        let Some(call) = Call::of(pid) else { return };
        if !call.enters {
            if let Some(error) = self.failing.remove(&pid) {
                set_registers(pid, |registers| registers.rax = i64::from(-error).cast_unsigned());
            }
            return;
        }
        let Some(kind) = call.kind() else { return };
        let number = self.calls.len();
        self.calls.push(kind);
        if let Some((at, fault)) = self.fault
            && at == number
        {
            match fault {
                Fault::Fail(error) => self.broken = Some((kind, error)),
                Fault::Kill => send(self.leader, libc::SIGKILL),
                Fault::Signal(signal) => send(self.leader, signal),
                Fault::Meanwhile(act) => act(),
            }
        }
        if let Some((broken, error)) = self.broken
            && broken == kind
        {
            // No call has this number: nothing is done, and the result is set when it returns.
            set_registers(pid, |registers| registers.orig_rax = u64::MAX);
            self.failing.insert(pid, error);
        }
    }
}

/// A system call at which a thread has stopped.
struct Call {
    enters: bool,
    number: c_long,
    arguments: [u64; 6],
}

impl Call {
    fn of(pid: pid_t) -> Option<Self> {
        // struct ptrace_syscall_info: op and arch in the first word, two pointers, the number, arguments.
        let mut info = [0u64; 16];
        ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, size_of_val(&info), info.as_mut_ptr().cast()).ok()?;
        let mut arguments = [0; 6];
        arguments.copy_from_slice(&info[4..10]);
        let enters = info[0] & 0xff == u64::from(libc::PTRACE_SYSCALL_INFO_ENTRY);
        Some(Self { enters, number: c_long::try_from(info[3]).unwrap_or(-1), arguments })
    }

    fn kind(&self) -> Option<Kind> {
        Some(match self.number {
            // Standard output and error are not files of the artifact.
            libc::SYS_write | libc::SYS_writev if self.arguments[0] > 2 => Kind::Write,
            libc::SYS_pwrite64 | libc::SYS_copy_file_range | libc::SYS_sendfile | libc::SYS_splice => {
                Kind::Write
            }
            libc::SYS_openat if self.arguments[2] & libc::O_CREAT as u64 != 0 => Kind::Create,
            libc::SYS_open if self.arguments[1] & libc::O_CREAT as u64 != 0 => Kind::Create,
            libc::SYS_mkdir | libc::SYS_mkdirat => Kind::Create,
            libc::SYS_fsync | libc::SYS_fdatasync => Kind::Sync,
            libc::SYS_rename | libc::SYS_renameat | libc::SYS_renameat2 => Kind::Rename,
            libc::SYS_unlink | libc::SYS_unlinkat | libc::SYS_rmdir => Kind::Remove,
            _ => return None,
        })
    }
}

fn set_registers(pid: pid_t, change: impl FnOnce(&mut libc::user_regs_struct)) {
    // SAFETY: a structure of integers.
    let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    let at: *mut c_void = (&raw mut registers).cast();
    if ptrace(libc::PTRACE_GETREGS, pid, 0, at).is_ok() {
        change(&mut registers);
        // A thread that is gone needs none.
        let _ = ptrace(libc::PTRACE_SETREGS, pid, 0, (&raw mut registers).cast());
    }
}

/// Lets a thread run to its next stop. One that was killed is not there any more.
fn go_on(pid: pid_t, signal: c_int) {
    let _ = ptrace(libc::PTRACE_SYSCALL, pid, 0, signal as usize as *mut c_void);
}

fn send(pid: pid_t, signal: c_int) {
    // SAFETY: no memory is involved.
    unsafe { libc::kill(pid, signal) };
}

fn wait(pid: pid_t) -> Result<(pid_t, c_int)> {
    let mut status = 0;
    loop {
        // SAFETY: the status is written to a local.
        let found = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL | libc::__WNOTHREAD) };
        match found {
            -1 if Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            -1 => return Err(Error::last_os_error()),
            pid => return Ok((pid, status)),
        }
    }
}

fn ptrace(request: libc::c_uint, pid: pid_t, address: usize, data: *mut c_void) -> Result<c_long> {
    // SAFETY: requests of this module read and write the structures that `data` points to, or take a
    // number in its place.
    match unsafe { libc::ptrace(request, pid, address as *mut c_void, data) } {
        -1 => Err(Error::last_os_error()),
        value => Ok(value),
    }
}
