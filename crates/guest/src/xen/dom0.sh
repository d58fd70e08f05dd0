# Run once in the first domain: what its tools expect of a Debian, then xenstored and the console daemon.
mkdir -p /root/proc/xen
mount -t xenfs xenfs /root/proc/xen
mkdir -p /root/run/xen /root/run/xenstored /root/run/xen-hotplug /root/var/lib/xen /root/var/lib/xenstored /root/var/log/xen/console
ln -s /run /root/var/run
ln -s /run/lock /root/var/lock
cat >/root/run/start <<'END'
set -e
xenstored --pid-file=/run/xen/xenstored.pid
until xenstore-exists / 2>/dev/null; do sleep 0.1; done
xen-init-dom0 >/dev/null
xenconsoled --log=guest --log-dir=/var/log/xen/console --pid-file=/run/xen/xenconsoled.pid
END
chroot /root /bin/sh /run/start
