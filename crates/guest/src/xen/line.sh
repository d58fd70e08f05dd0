# Joins the console of domain $id with the host's line $line for as long as both are there, and says
# `bye` and its number to the host when the domain is gone. The terminal is then gone too, and hangs up on its session.
trap '' HUP
for name in /sys/class/virtio-ports/*/name; do
	[ "$(cat $name)" = ringtap.$line ] && port=${name%/name}
done
port=/dev/${port##*/}
# The line's last user may not have let go of it.
until (exec 3<>$port) 2>/dev/null; do sleep 0.1; done
exec 3<>$port 4<>$(xenstore-read /local/domain/$id/console/tty)
cat <&3 >&4 &
cat <&4 >&3 2>/dev/null
# Where the host has gone first, the reader of its end is no more (`jobs` sees that), and who says something waits for the line's
# next user. That may happen meanwhile, too: who it is that has gone is said for that.
jobs >/dev/null
kill -0 $! 2>/dev/null && printf '\nbye %s\n' $id >&3
kill $!
