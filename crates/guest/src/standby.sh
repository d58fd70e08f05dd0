# Sourced: `standby PROGRAM WORD...` runs a program that stands by in the guest (one call at a time), and one that does
# not as usual. Not in a subshell, whose stdout is not that of $$.
standby() {
	[ -e /run/standby-$1.ready ] || { "$@"; return; }
	# The program's child opens these files anew and appends, and so must this shell from now on.
	exec >>/proc/$$/fd/1 2>>/proc/$$/fd/2
	standby_of=/run/standby-$1
	shift
	# A reply of its own: another caller that waits must not take it.
	[ -p $standby_of.$$ ] || mkfifo $standby_of.$$ || return 126
	# Open before the call is made, and for writing too: that waits for nobody and has no end.
	exec 8<>$standby_of.$$
	printf '%s\n' $$ "$@" '' >$standby_of.ask
	read -r standby_status <&8
	exec 8<&-
	return ${standby_status:-126}
}
