//! The same of the verbs that serve, and of those that speak to a server.

use super::section::{EXIT, EXIT_SERVING, SIGNALS, Section};

/// What is said of a verb.
pub(super) fn sections(command: &str) -> &'static [Section] {
    match command {
        "serve" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap serve vm.raw -f raw --vhost-user /run/vm.sock",
                        "to QEMU, Cloud Hypervisor, Firecracker, crosvm or User-Mode Linux",
                    ),
                    (
                        "ringtap serve vm.raw -f raw --nbd unix:/run/vm.nbd",
                        "to NBD clients: nbdcopy, QEMU, nbd-client",
                    ),
                    (
                        "ringtap serve a.raw -f raw --name a --nbd tcp:[::1]:10809 \
                         b.raw -f raw --name b --nbd tcp:[::1]:10809 --read-only",
                        "two disks at one port, by name",
                    ),
                    (
                        "ringtap serve vm.luks -f luks --secret credential:vm --vhost-user /run/vm.sock",
                        "an encrypted disk, opened with LoadCredential=vm:PATH of its systemd unit",
                    ),
                    (
                        "ringtap serve vm.qcow2 -f qcow2 --backing /srv/base --vhost-user /run/vm.sock",
                        "an overlay that qemu-img made, in a folder that others write to",
                    ),
                    (
                        "ringtap serve data.qcow2 -f qcow2 --ublk=7",
                        "make it a block device of this host, /dev/ublkb7",
                    ),
                    (
                        "ringtap serve null:10G --vhost-user /run/null.sock",
                        "a disk that holds nothing, to measure the transport alone",
                    ),
                ],
            ),
            SIGNALS,
            EXIT_SERVING,
        ],
        "daemon" => &[
            (
                "Examples",
                &[
                    (
                        "ringtap daemon",
                        "serve the disks of /etc/ringtap/disks.d, and what `ringtap disk add`, or a client of QMP, brings",
                    ),
                    (
                        "ringtap daemon --persist",
                        "and write there what they bring, so that the next server has it",
                    ),
                    (
                        "ringtap daemon --control unix:/run/vm1.control --pid-file /run/vm1.pid",
                        "one for each virtual machine, as qemu-storage-daemon is often used",
                    ),
                ],
            ),
            SIGNALS,
            EXIT_SERVING,
        ],
        "top" => &[
            (
                "Examples",
                &[
                    ("ringtap top", "the disks of `ringtap daemon`, once a second"),
                    (
                        "ringtap top --once --interval 10 --output json",
                        "ten seconds of them, for a program",
                    ),
                ],
            ),
            EXIT,
        ],
        "upgrade" => &[
            (
                "Examples",
                &[
                    ("ringtap upgrade", "`ringtap daemon`, by the program that is installed now"),
                    ("ringtap upgrade $(cat /run/vm1.pid)", "a server without a control socket"),
                    (
                        "ringtap upgrade unix:/run/vm1.control --binary /opt/ringtap-2/bin/ringtap",
                        "by another program, for a trial",
                    ),
                ],
            ),
            EXIT,
        ],
        "stop" => &[
            (
                "Examples",
                &[
                    ("ringtap stop $(cat /run/vm1.pid)", "returns once it has ended"),
                    (
                        "ringtap stop --keep $(cat /run/d.pid)",
                        "/dev/ublkb0 waits for the next server",
                    ),
                ],
            ),
            EXIT,
        ],
        "reload" => {
            &[("Examples", &[("ringtap reload $(cat /run/vm1.pid)", "its image has grown")]), EXIT]
        }
        "disk" => &[
            (
                "Examples",
                &[
                    ("ringtap disk list", "the disks of `ringtap daemon`"),
                    (
                        "ringtap disk add /srv/vm.qcow2 -f qcow2 --node-name vm --vhost-user /run/vm.sock",
                        "serve one more, to a virtual machine",
                    ),
                    (
                        "ringtap disk add /srv/b.raw -f raw --node-name b --nbd b --nbd-server unix:/run/nbd.sock",
                        "to NBD clients",
                    ),
                    ("ringtap disk resize vm +10G", "make it larger while its guest runs"),
                    ("ringtap disk info vm --output json", "all that is known of it"),
                    (
                        "ringtap disk limit vm --iops 1000:2000:60 --bps 100M",
                        "hold it to a rate, but for a minute's burst",
                    ),
                    (
                        "ringtap disk group tenant --iops 5000",
                        "a group of disks, to one rate together",
                    ),
                    (
                        "ringtap disk snapshot vm /srv/vm-monday.qcow2 db /srv/db-monday.qcow2",
                        "two disks go on in overlays, from one moment on",
                    ),
                    (
                        "ringtap disk snapshot vm /srv/a.qcow2 --before 'virsh domfsfreeze vm' --after 'virsh domfsthaw vm'",
                        "with the guest's file systems at rest",
                    ),
                    ("ringtap disk commit vm", "all in one image again, while the guest runs"),
                    ("ringtap disk stream vm", "the same, in the image above"),
                    (
                        "ringtap disk detach vm",
                        "its base in a store comes into its image: then the store may go",
                    ),
                    (
                        "ringtap disk mirror vm /fast/vm.qcow2 -f qcow2 --zeroed --rate 100M",
                        "move it to an image just made, at 100 MiB/s",
                    ),
                    (
                        "ringtap disk migrate vm 'nbds://other/vm?tls-certificates=/etc/ringtap/tls'",
                        "move it to another host's server",
                    ),
                    (
                        "ringtap disk backup vm /backup/vm.qcow2 -f qcow2 --zeroed",
                        "a copy of this moment, into an image just made",
                    ),
                    (
                        "ringtap disk backup vm /backup/vm.qcow2 -f qcow2 --zeroed --checkpoint nightly",
                        "the same, and from that moment on it is noted what changes",
                    ),
                    (
                        "ringtap disk backup vm /backup/vm.qcow2 -f qcow2 --since nightly",
                        "the next night: only that, into the same image",
                    ),
                    ("ringtap disk checkpoint list vm", "how much it is"),
                    (
                        "ringtap disk check vm",
                        "whether its image contradicts itself, with the exit status of `ringtap check`",
                    ),
                    ("ringtap disk remove vm", "flush it, close it, and leave its image to others"),
                    (
                        "ringtap disk list --control unix:/run/vm1.control",
                        "the disks of another server",
                    ),
                ],
            ),
            EXIT,
        ],
        "job" => &[
            (
                "Examples",
                &[
                    ("ringtap job list", "what there is, how far it is, and how fast"),
                    (
                        "ringtap job rate commit-vm 50M",
                        "limit one that `ringtap disk commit vm` began",
                    ),
                    (
                        "ringtap job wait mirror-vm",
                        "see one to its end that was begun with --no-wait",
                    ),
                    ("ringtap job cancel mirror-vm", "the disk stays where it is"),
                ],
            ),
            EXIT,
        ],
        "xen" => &[
            (
                "Examples",
                &[
                    ("ringtap xen", "serve what guests' configurations leave to it, such as:"),
                    (
                        "disk = [ 'format=raw,vdev=xvda,access=w,script=block-ringtap,\
                         target=qcow2:/srv/vm.qcow2' ]",
                        "in a guest's configuration for xl, where tap:qcow2:/srv/vm.qcow2,xvda,w was",
                    ),
                    (
                        "ringtap xen --cache writeback --backing /srv/templates",
                        "by the host's page cache, with overlays on images in another folder",
                    ),
                ],
            ),
            (
                "Signals",
                &[
                    (
                        "SIGTERM, SIGINT",
                        "take no more requests, end those in flight, flush, exit 0; guests wait for \
                         the next server; the second time exit at once with 130",
                    ),
                    ("SIGHUP", "look again how large the images are and tell the guests"),
                    (
                        "SIGUSR1",
                        "print the state and statistics of every disk as one line of JSON on stderr",
                    ),
                ],
            ),
            EXIT_SERVING,
        ],
        _ => &[],
    }
}
