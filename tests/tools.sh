#!/bin/sh
# Programs that tests drive: a browser for pages, promtool for metrics and alert rules, age and zstd for archives,
# shellcheck for the examples.
# Usage: tools.sh BIN
#
# Missing ones are installed only where CI=true or TOOLS=1, and where we may: Debian or Ubuntu, as root or with a sudo that
# does not ask. promtool is taken out of its package and put into BIN, since the package as a whole would start a server.
# Otherwise one line says which tests are skipped, and this succeeds. Where CI=true those tests fail.
bin=$1
PATH=$bin:$PATH

missing() {
    for program in chromium chromedriver promtool age zstd shellcheck; do
        command -v "$program" >/dev/null 2>&1 || printf ' %s' "$program"
    done
}

give_up() {
    tests=
    case $(missing) in *chrom*) tests="$tests, pages in a browser"; esac
    case $(missing) in *promtool*) tests="$tests, metrics and alert rules"; esac
    case $(missing) in *age*|*zstd*) tests="$tests, archives opened with age and zstd"; esac
    case $(missing) in *shellcheck*) tests="$tests, the examples' scripts"; esac
    becomes=skipped
    [ "$CI" != true ] || becomes="run and fail, since CI=true"
    echo "not installed:$(missing) ($1). Tests of these are $becomes: ${tests#, }." >&2
    exit 0
}

[ -n "$(missing)" ] || exit 0
[ "$CI" = true ] || [ "$TOOLS" = 1 ] || give_up "'make test TOOLS=1' installs them with apt-get"
command -v apt-get >/dev/null 2>&1 || give_up "no apt-get here"
as_root=
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || give_up "neither root nor a sudo that does not ask"
    as_root="sudo -n"
fi

scratch=$(mktemp -d) || give_up "no temporary folder"
trap 'rm -rf "$scratch"' EXIT
quiet="-qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -o Acquire::Retries=2 -o Acquire::http::Timeout=20"
echo "installing$(missing) with apt-get" >&2
$as_root apt-get $quiet update >"$scratch/log" 2>&1

case $(missing) in *chrom*)
    # Ubuntu's chromium is a stub that asks for a snap; it leaves these programs missing, which is then said.
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get $quiet install -y --no-install-recommends \
        chromium chromium-driver fonts-dejavu-core >>"$scratch/log" 2>&1
esac
for program in age zstd shellcheck; do
    case $(missing) in *$program*)
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get $quiet install -y --no-install-recommends \
            $program >>"$scratch/log" 2>&1
    esac
done
case $(missing) in *promtool*)
    mkdir "$scratch/deb" && cd "$scratch/deb" &&
        apt-get $quiet -o APT::Sandbox::User=root download prometheus >>"$scratch/log" 2>&1 &&
        dpkg-deb -x prometheus_*.deb tree && install -m 755 tree/usr/bin/promtool "$bin/promtool"
esac
[ -z "$(missing)" ] || give_up "apt-get: $(tail -n 1 "$scratch/log")"
