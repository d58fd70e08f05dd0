#!/bin/sh
# The first program of every guest: mounts what a kernel offers, loads the modules packed beside
# it, and then obeys the host over one byte stream (a UML console line, a virtio port, or the console
# of a Xen domain).
#
# From the host, a line each:   add ID BASE64 | run ID PLACE | kill ID | off
# To the host:                  hello | got (for every line read) | begin ID | end ID STATUS |
#                               out ID BASE64 | err ID BASE64 | fin ID
# PLACE is `init` (here, busybox only) or `root` (the guest's root, once the host has mounted it).
# When the stream ends, its other end has died, and the guest goes with it.

/bin/busybox --install -s /bin
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/busybox
export HOME=/root LANG=C.UTF-8 TERM=dumb

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr

# The kernel's own loader would find these in its command line: MODULE.NAME=VALUE, with _ for -.
given=
for word in $(cat /proc/cmdline); do
	case $word in *.*=*) given="$given $word" ;; esac
done
while read -r module; do
	options=
	for word in $given; do
		[ "$(echo "${module##*/}" | tr - _)" != "${word%%.*}" ] || options="$options ${word#*.}"
	done
	insmod "/modules/$module.ko" $options || echo "ringtap: cannot load $module"
done </modules/order

jobs=/run/jobs
mkdir $jobs

# Jobs share the stream without a lock: every line is one write, and a terminal as well as a virtio
# port takes a write as a whole.
lines() {
	[ -s $2 ] && base64 -w 1200 <$2 | awk -v head="$1 " '{ print head $0; fflush() }' >&3
}

# Each process that this starts costs a guest some milliseconds, and a measurement has a few of these jobs.
job() {
	id=$1
	script=$(base64 -d <$jobs/$id.add)
	case $2 in
	init) set -- sh -c ;;
	*) set -- chroot /root /bin/sh -c ;;
	esac
	echo "begin $id" >&3
	# A background process leads no group, so setsid stays the process that it is.
	setsid "$@" "$script" <$jobs/none >$jobs/$id.out 2>$jobs/$id.err 3>&- &
	echo $! >$jobs/$id.pid
	wait $!
	echo "end $id $?" >&3
	lines "out $id" $jobs/$id.out
	lines "err $id" $jobs/$id.err
	echo "fin $id" >&3
	rm -f $jobs/$id.*
}

# The word to kill may come before there is a process, or before it leads its group.
end_job() {
	while [ -e $jobs/$1.add ] && ! { [ -s $jobs/$1.pid ] && kill -KILL -$(cat $jobs/$1.pid); }; do
		sleep 0.05
	done
}

agent() {
	: >$jobs/none
	# Behind whatever half a line stands there.
	printf '\nhello\n' >&3
	while read -r verb id rest <&3; do
		echo got >&3
		case $verb in
		add) echo "$rest" >>$jobs/$id.add ;;
		run) job $id "$rest" & ;;
		kill) end_job $id & ;;
		off) break ;;
		esac
	done
}

case $ringtap_port in
tty* | hvc*)
	exec 3<>/dev/$ringtap_port
	stty raw -echo <&3
	# The kernel's messages go to the same console in a Xen domain; those that end it still come.
	[ $ringtap_port != hvc0 ] || dmesg -n 1
	;;
*)
	while ! grep -lx "$ringtap_port" /sys/class/virtio-ports/*/name >/run/port 2>/dev/null; do
		sleep 0.1
	done
	port=$(cat /run/port)
	port=${port%/name}
	exec 3<>/dev/${port##*/}
	;;
esac
agent
sync
poweroff -f
