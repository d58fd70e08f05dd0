# Shell functions for Xen's first domain. $ringtap is the binary; of /dev/vda and /dev/vdb the one has images on an
# ext4, the other is room for volumes.
set -e
export DM_DISABLE_UDEV=1
run=/run/lab

# prepare SECTORS DOMAINS: once for each boot. Without udev nobody makes nodes but dmsetup itself.
prepare() {
	mkdir -p /srv $run
	mount -t ext4 /dev/vda /srv
	for n in $(seq $2); do
		dmsetup create --noudevsync disk$n --table "0 $1 linear /dev/vdb $(((n - 1) * $1))"
	done
	chmod 755 /etc/xen/scripts/block-ringtap /etc/xen/scripts/block-node
}

# by_blkback DOMAIN DEVICE NODE: it takes every disk of the same kind once it is loaded.
by_blkback() {
	modprobe xen-blkback
	attach $1 $2 block-node $3
}

# by_ringtap DOMAIN DEVICE TARGET OPTION…: started with the first disk.
by_ringtap() {
	domain=$1 device=$2 target=$3
	shift 3
	[ -e $run/pid ] || serve "$@"
	attach $domain $device block-ringtap $target
}

attach() {
	xl block-attach $1 "format=raw,vdev=$2,access=w,script=$3,target=$4"
}

serve() {
	: >$run/said
	setsid $ringtap xen "$@" >$run/said 2>$run/log &
	echo $! >$run/pid
	for i in $(seq 600); do
		! grep -q ready $run/said || return 0
		kill -0 $(cat $run/pid) 2>/dev/null || break
		sleep 0.1
	done
	echo "ringtap xen $* is not ready" >&2
	tail -5 $run/log >&2
	return 1
}

# detach DOMAIN DEVICE: a disk whose attaching has failed is none that could be in the way of the next one.
detach() {
	said=$(xl block-detach $1 $2 2>&1) && return
	case $said in
	*"not connected"*) ;;
	*)
		echo "$said" >&2
		return 1
		;;
	esac
}

# release DOMAIN DEVICE …: each disk detached, whatever served it ended, and nothing of it in the page cache. Prints what
# the server said.
release() {
	while [ $# -gt 0 ]; do
		detach $1 $2
		shift 2
	done
	if [ -e $run/pid ]; then
		pid=$(cat $run/pid)
		kill -TERM $pid 2>/dev/null || true
		for i in $(seq 300); do
			# Nobody may have fetched its status yet.
			grep -s ^State: /proc/$pid/status | grep -qv Z || break
			sleep 0.1
		done
		rm $run/pid
		cat $run/log
	fi
	! grep -q ^xen_blkback /proc/modules || rmmod xen-blkback
	losetup -D
	sync
	echo 3 >/proc/sys/vm/drop_caches
}
