//! Denies system calls to sandboxed programs with seccomp.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

use crate::sandbox::Sandbox;

/// Local socket families: `AF_UNIX` and `AF_VSOCK`, which some C libraries do not define.
const LOCAL_SOCKET_FAMILIES: [i32; 2] = [libc::AF_UNIX, 40];

/// Flags of `clone` that create a namespace.
const NAMESPACE_CLONE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// System calls with the conditions under which they are denied. No conditions means always.
type SyscallRules = BTreeMap<i64, Vec<SeccompRule>>;

fn seccomp_error(error: impl std::fmt::Display) -> String {
    format!("cannot filter system calls: {error}")
}

/// Builds a condition on the first argument of a system call.
fn first_argument_condition(is: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(0, SeccompCmpArgLen::Dword, is, value)?])
}

/// Makes these system calls fail with an error code, in this process and its descendants.
fn deny_system_calls(mut rules: SyscallRules, with: i32) -> Result<(), String> {
    // The x32 ABI has separate numbers for the same calls.
    if std::env::consts::ARCH == "x86_64" {
        let others: SyscallRules =
            rules.iter().map(|(call, cases)| (call | 0x4000_0000, cases.clone())).collect();
        rules.extend(others);
    }
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(seccomp_error)?;
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(with.unsigned_abs()),
        arch,
    )
    .map_err(seccomp_error)?;
    let program: BpfProgram =
        filter.try_into().map_err(|error: BackendError| seccomp_error(error))?;
    seccompiler::apply_filter(&program).map_err(seccomp_error)
}

impl Sandbox {
    /// Denies system calls that no tool needs, and sockets if the network is not allowed.
    pub(crate) fn filter_system_calls(&self) -> Result<(), String> {
        let denied = [
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_setns,
            libc::SYS_unshare,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_open_by_handle_at,
            libc::SYS_kexec_load,
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_swapoff,
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_io_uring_setup,
        ];
        let mut rules: SyscallRules = denied.into_iter().map(|call| (call, Vec::new())).collect();
        // With network access, only local sockets are denied. Without it, all sockets are denied.
        // Local services are denied because they can start programs outside of the sandbox.
        let local = LOCAL_SOCKET_FAMILIES.into_iter().filter(|_| self.network);
        let local = local.map(|family| {
            first_argument_condition(SeccompCmpOp::Eq, u64::from(family.unsigned_abs()))
        });
        rules
            .insert(libc::SYS_socket, local.collect::<Result<Vec<_>, _>>().map_err(seccomp_error)?);
        // A process may lower its own limits. With the limits of another process it could kill that
        // process, which landlock does not prevent.
        rules.insert(
            libc::SYS_prlimit64,
            vec![first_argument_condition(SeccompCmpOp::Ne, 0).map_err(seccomp_error)?],
        );
        let namespace = |flag: i32| {
            let flag = u64::from(flag.unsigned_abs());
            first_argument_condition(SeccompCmpOp::MaskedEq(flag), flag)
        };
        rules.insert(
            libc::SYS_clone,
            NAMESPACE_CLONE_FLAGS
                .into_iter()
                .map(namespace)
                .collect::<Result<Vec<_>, _>>()
                .map_err(seccomp_error)?,
        );
        deny_system_calls(rules, libc::EPERM)?;
        // `clone3` passes its flags by pointer, which seccomp cannot read. `ENOSYS` makes libc fall
        // back to `clone`.
        deny_system_calls(SyscallRules::from([(libc::SYS_clone3, Vec::new())]), libc::ENOSYS)
    }
}
