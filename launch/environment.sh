# shellcheck shell=bash
# How launch/setup.sh makes an environment of Python; it sources this from the repository's root.
# An environment is a folder whose name ends in a checksum of what it was made for, and a link to it:
# a new one is made beside the old one, and then the link is changed.

torch_version=2.13.0
# What the connector is tested with. launch/setup.sh uses them.
# shellcheck disable=SC2034
vllm_version=0.32.0 nixl_version=1.5.1
# Trainers that the adapters in examples/ are tested with, which ask for versions of other packages that
# do not go together: they are installed without what they depend on, and what their imports need.
# shellcheck disable=SC2034
trainers=(torchtitan==0.3.0 nemo-automodel==0.7.0 veomni==0.1.12 ms-swift==4.6.0 verl==0.9.1)
# shellcheck disable=SC2034
needed_by_trainers=(transformers==5.18.0 'datasets>=4,<4.8' spmd-types==0.2.3 tensordict==0.10.0 'peft<0.21'
    'trl<1' ray==2.60.0 torchao==0.18.0 torchdata==0.11.0 triton==3.7.1 modelscope==1.40.2 einops tyro
    tensorboard codetiming hydra-core pylatexenc json-repair addict scipy)

# What an environment of this checkout depends on, beside its Python.
stamp_of_checkout() {
    echo "torch $torch_version, dependencies $(sed '/^\[tool/,$d' pyproject.toml | cksum | cut -d ' ' -f 1)"
}

# install FOLDER WHAT ARGUMENTS...: pip, with its own bars on a terminal, else a line every ten seconds.
install() {
    local folder=$1 what=$2 log=$1/pip.log
    shift 2
    local pip=("$folder/bin/python" -m pip --disable-pip-version-check install
        --constraint "$folder/constraints.txt")
    echo "installing $what" >&2
    if [ -t 2 ]; then
        "${pip[@]}" "$@" >&2 || die "pip could not install $what: what it says is above"
        return
    fi
    "${pip[@]}" --progress-bar off "$@" >"$log" 2>&1 &
    telling $! doing_of_pip "$folder" || {
        tail -n 20 "$log" >&2
        die "pip could not install $what: its output is in $log"
    }
}

# doing_of_pip FOLDER: how far pip is, and what its log says last. Packages are unpacked at the end: until then
# those that it has found count, also in its cache.
doing_of_pip() {
    local doing size found
    doing=$(sed -n 's/Installing collected packages.*/unpacking/p; s/^ *\(\(Collecting\|Downloading\|Using cached\) .*\)/\1/p' "$1/pip.log" | tail -n 1)
    size=$(du -sm "$1/lib" | cut -f 1)
    found=$(grep -cE '^ *(Downloading|Using cached) ' "$1/pip.log") || true
    echo "$found packages found, $size MB unpacked: ${doing:0:70}"
}

# users_of FOLDER: the processes that run from this environment, one a line.
users_of() {
    local folder process program
    folder=$(readlink -e "$1") || return 0
    {
        # The interpreter is a link to another folder: the libraries that a process has loaded tell, or
        # the name that it was started by.
        grep -lsF " $folder/" /proc/[0-9]*/maps | cut -d / -f 3
        for process in /proc/[0-9]*; do
            IFS= read -r -d '' program <"$process/cmdline" || continue
            case $program in
                *.venv*/bin/* | */distca/*/bin/* | "$folder"/*) ;;
                *) continue ;;
            esac
            program=$(cd "$process/cwd" && readlink -e "${program%/*}") || continue
            [ "$program" != "$folder/bin" ] || echo "${process#/proc/}"
        done
    } 2>/dev/null | sort -un | while read -r process; do
        echo "process $process, $(tr '\0' ' ' <"/proc/$process/cmdline" 2>/dev/null | cut -c 1-70)"
    done
}

# refuse_if_used LINK: ends the script where an environment to be replaced is in use.
refuse_if_used() {
    local users
    # All of them: a reader that leaves after the first line ends the script by SIGPIPE.
    users=$(users_of "$1")
    [ -z "$users" ] || die "$1 has to be made anew, and is in use (${users%%$'\n'*}): end that first"
}

# suits LINK STAMP: whether the environment was made for the same, and by the PYTHON that is asked for.
suits() {
    [ "$(sed -n 1p "$1/set-up-for" 2>/dev/null)" = "$2" ] && [ -n "$(python_version "$1/bin/python")" ] &&
        { [ -z "${PYTHON:-}" ] || [ "$(sed -n 2p "$1/set-up-for")" = "$(command -v "$PYTHON")" ]; }
}

# has LINK STAMP EXTRAS: whether nothing is to be done.
has() {
    local extra
    suits "$1" "$2" || return 1
    for extra in ${3//,/ }; do
        grep -qx "with $extra" "$1/set-up-for" || return 1
    done
}

# provide LINK STAMP VERSIONS EXTRAS ARGUMENTS...: makes sure that the link leads to an environment of
# one of these versions of Python with these extras of the project, and whatever else pip is to install.
provide() {
    local link=$1 stamp=$2 versions=$3 extras=$4 python folder lock begun=$SECONDS
    shift 4
    ! has "$link" "$stamp" "$extras" || return 0
    mkdir -p "$(dirname "$link")"
    exec {lock}>"$link.lock"
    flock --nonblock "$lock" || {
        echo "waiting for another set-up of $link" >&2
        flock "$lock"
    }
    if ! has "$link" "$stamp" "$extras"; then
        if suits "$link" "$stamp"; then
            add_extras "$link" "$extras"
        else
            refuse_if_used "$link"
            # shellcheck disable=SC2086 # several versions
            python=$(find_python $versions) || exit 2
            folder=$link-$(cksum <<<"$stamp $python" | cut -d ' ' -f 1)
            suits "$folder" "$stamp" || begin_environment "$folder" "$stamp" "$python"
            install "$folder" "distca[$extras] and what it needs" "$@" ".[$extras]"
            note_extras "$folder" "$extras"
            swap_in "$folder" "$link"
        fi
        echo "$link is ready, after $(seconds_as_text $((SECONDS - begun)))" >&2
    fi
    exec {lock}>&-
}

# note_extras FOLDER EXTRAS: that these are there.
note_extras() {
    # shellcheck disable=SC2086 # several extras
    printf 'with %s\n' ${2//,/ } >>"$1/set-up-for"
}

# add_extras FOLDER EXTRAS: adds packages to an environment that processes may run from. What is there
# stays as it is, the project's own entry included.
add_extras() {
    local missing
    echo "adding what is missing to $1; what is there stays as it is" >&2
    "$1/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable |
        grep -v '^distca ' | cat "$1/constraints.txt" - >"$1/constraints-of-added.txt"
    mapfile -t missing < <("$1/bin/python" launch/requirements.py "$2")
    [ ${#missing[@]} -gt 0 ] || die "pyproject.toml has nothing for $2"
    install "$1" "what $2 needs" --constraint "$1/constraints-of-added.txt" "${missing[@]}"
    note_extras "$1" "$2"
}

# begin_environment FOLDER STAMP PYTHON: with torch, which no later step may replace by another build.
begin_environment() {
    echo "setting up $1 with $("$3" --version), $3 (once; some minutes)" >&2
    "$3" -m venv --clear "$1"
    echo "torch==$torch_version" >"$1/constraints.txt"
    # From 25.1 on pip has a bar for the unpacking, too.
    install "$1" pip "pip>=25.1"
    install "$1" "torch $torch_version and the libraries that it needs" "torch==$torch_version" numpy
    printf '%s\n' "$2" "$3" >"$1/set-up-for"
}

# swap_in FOLDER LINK: from one moment to the next; the environments that were there before go.
swap_in() {
    local old
    refuse_if_used "$2"
    # It was a folder once.
    [ -L "$2" ] || [ ! -e "$2" ] || mv "$2" "$2-old"
    ln -sfn "$(basename "$1")" "$2.new"
    mv -T "$2.new" "$2"
    for old in "$2"-*; do
        [[ $old =~ -([0-9]+|old)$ ]] && [ "$old" != "$1" ] && [ -z "$(users_of "$old")" ] || continue
        rm -rf "$old"
    done
}
