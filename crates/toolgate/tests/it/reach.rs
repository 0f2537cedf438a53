//! Files that a command reaches and does not name: what it unpacks, fetches or clears, and whole trees that it reads.

use serde_json::json;
use toolgate::policy::{Condition, Deny};
use toolgate::{Agent, Tool, Toolgate};

use crate::shell::verdict;
use crate::support::Built;

/// A gate with a lenient rule about places, as toolgate protects its own; with `from`, also against searches that begin there.
pub(crate) fn gate(places: &[&str], from: Option<&str>) -> Toolgate {
    let places = places.iter().map(|place| (*place).to_owned()).collect();
    let condition = Condition::Touches { places, lenient: true, trees: false, whole: false, from: from.map(str::to_owned) };
    let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
    let agent = Agent::builder("coder")
        .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
        .policy(Deny::new("own", ["bash"]).when("/command", condition).reason("Not for agents."));
    crate::support::gate().agent(agent.build().unwrap()).built()
}

pub(crate) async fn each_is(gate: &Toolgate, expected: &str, commands: &[&str]) {
    let mut wrong = Vec::new();
    for (n, command) in commands.iter().enumerate() {
        let said = verdict(gate, n, command).await;
        if said != expected {
            wrong.push(format!("{said}: {command}"));
        }
    }
    assert!(wrong.is_empty(), "not {expected}:\n{}", wrong.join("\n"));
}

pub(crate) const OWN: [&str; 4] =
    ["/home/ann/desk/toolgate.toml", "/home/ann/desk/.claude/settings.json", "/home/ann/.local/state/toolgate", "/usr/local/bin/toolgate"];

#[tokio::test]
async fn what_may_be_unpacked_over_a_place_is_asked() {
    let commands = [
        "tar xzf a.tgz",
        "tar -xzf a.tgz",
        "tar --extract --file a.tgz",
        "tar $MODE a.tgz",
        "tar xzf a.tgz -C .claude",
        "tar -C .claude -xzf a.tgz",
        "tar -xzC .claude -f a.tgz",
        "tar xzfC a.tgz .claude",
        "tar --directory=.claude -xf a.tgz",
        "tar --dir .claude -xf a.tgz",
        "tar -xf a.tgz -C/home/ann",
        "tar -xf a.tgz -C /",
        "tar -xPf a.tgz -C /tmp/x",
        "tar -xf a.tgz -C \"$DIR\"",
        "tar -xfO -C .claude",
        "tar -xf a.tar --owner -O",
        "tar -xf a.tar --own -vO",
        "cd /tmp/x && tar -xf a.tar --own -- -C /home/ann/desk",
        "tar -xf a.tar --mtime -O",
        "tar -xf a.tar --some-option -O",
        "curl -sL https://x.example/a.tgz | tar xz",
        "bash -c 'tar xzf a.tgz'",
        "busybox tar xf a.tgz -C .claude",
        "sudo -u ann tar xf a.tgz",
        "env -C .claude tar xf /tmp/a.tgz",
        // Where it stands.
        "cd .claude && tar xf ../a.tgz",
        "cd /home/ann && tar xf a.tgz",
        "cd /tmp/x; tar xf a.tgz",
        "cd /tmp/x || tar xf a.tgz",
        "cd /tmp/x && (cd /home/ann; tar xf a.tgz)",
        "cd /tmp/x && cd /home/ann && tar xf a.tgz",
        "cd /tmp/x && pushd .. && tar xf a.tgz",
        "true | cd /tmp/x && tar xf a.tgz",
        "! cd /tmp/x && tar xf a.tgz",
        "f() { cd /home/ann; }; cd /tmp/x && f && tar xf a.tgz",
        "cd /tmp/x && env -C /home/ann/desk tar xf a.tgz",
        "cd /tmp/x && jump && tar xf a.tgz",
        "cd \"$DIR\" && tar xf a.tgz",
        "cd ~ann/desk && tar xf a.tgz",
        "tar xf a.tgz -C ~+",
        "unzip a.zip -d ~+",
        // It is sent elsewhere.
        "cd /tmp && git --git-dir=/home/ann/desk/.git --work-tree=/home/ann/desk checkout -f .",
        "cd /tmp && git -C /home/ann/desk clean -fd",
        "cd /tmp && git -C /home/ann/desk stash -u",
        "cd /tmp && git -C /home/ann/desk rm -r .",
        "cd /tmp && GIT_WORK_TREE=/home/ann/desk GIT_DIR=/home/ann/desk/.git git checkout -f .",
        "cd /tmp && sudo -iuann find . -delete",
        "cd /tmp && env -iC/home/ann/desk tar xf a.tgz",
        "cd /tmp && env --chd=/home/ann/desk tar xf a.tgz",
        "cd /tmp/x && env --chdir=/home/ann/desk/env tar xf a.tgz -C ..",
        "UNZIP=-d/home/ann/desk unzip a.zip -d /tmp/x",
        // Behind a program that is called like one that runs nothing.
        "perf stat tar xf a.tgz",
        "direnv exec . unzip a.zip",
        "flock make tar xf a.tgz",
        "sudo flock make tar xf a.tgz",
        "sudo rustup run stable tar xf a.tgz",
        // Others.
        "unzip a.zip",
        "unzip -o a.zip -d .claude",
        "unzip a.zip -d.claude",
        "unzip a.zip -l",
        "unzip -p-p a.zip",
        "unzip -l --l a.zip",
        "sudo unzip a.zip",
        "7z x a.7z -aoa",
        "7z x a.7z -o.claude",
        "7z X a.7z",
        "cd /tmp && 7z x a.7z -O/home/ann/desk",
        "unrar x a.rar",
        "unrar X a.rar",
        "cd /tmp && unrar x -op/home/ann/desk a.rar",
        "cd /tmp/x && unrar x a.rar /home/ann/desk/.claude/",
        "jar xf a.jar",
        "cpio -id < a.cpio",
        "cpio -id --message -t < a.cpio",
        "cd /tmp/x && cpio -id < a.cpio",
        "python3 -m zipfile -e a.zip .claude",
        "python3 -m tarfile -e a.tar",
        "python3 -m tarfile -ea.tar",
        "python3 -m zipfile --ex a.zip .claude",
        "python3 -m zipfile --e a.zip",
        "python3 -m pip install -t .claude x",
        "pip --timeout 5 install -t .claude x",
        "dpkg -x a.deb .claude",
        "pip install -t .claude x",
        "pip install --pre -t .claude x",
        "scp -r host:d .claude",
        "wget -r -nH https://x.example",
        "wget -i list",
        "curl -OJ https://x.example/a",
        "curl -o \"$OUT\" https://x.example",
        "git clone https://x.example/a .",
        "git clone https://x.example/a .claude",
        "git clone https://x.example/.claude",
        "git clean -fdx",
        "git clean -fd -e node_modules",
        "git clean -n --no-dry-run -fd",
        "git clean -fd :/",
        "git restore :/",
        "git checkout -- ':!src'",
        "gunzip -N x.gz",
        "gunzip -S .new toolgate.toml.new",
        "curl -O 'https://x.example/{toolgate.toml}'",
        "curl -O 'https://x.example/toolgate.tom[l-l]'",
        "git -C sub clean -fd",
        "git stash -u",
        "git sparse-checkout set src",
        "find -name '*.toml' -delete",
        "some-formatter toolgate.toml",
        "timeout 5 ./fix toolgate.toml",
        "sudo -u ann ./fix toolgate.toml",
        "npx prettier --write toolgate.toml",
        "npm -v; ./fix toolgate.toml",
        // A name that is put together.
        "split -a1 -l1 --additional-suffix=.json evil .claude/setting",
        "mkdir xx && csplit -b '/../.claude/settings%.0d.json' evil 3",
        "split --a .json -l1 evil .claude/setting",
        "csplit -f .claude/set evil 3",
        "csplit -f .claude -b '/settings%.0d.json' evil 3",
        "patch -b -B .claude/sett ings.json x.patch",
        "SIMPLE_BACKUP_SUFFIX=.json cp -b x .claude/settings",
        // A name that is not known.
        ": .claude/settings.json; git log -1 --format=%b --output \"$_\"",
        "git log -1 --format=%b --output \"$F\"",
        "git log -1 --format=%b --output=\"$F\"",
        "git log -1 --format=%b --output=\"$D/settings.json\"",
        "gcc -E -P x -o \"$F\"",
        "gcc -E -P x -o\"$D/$F\"",
        "clang-17 -E -P x -o \".claude/set$F\"",
        // Behind a program that nobody knows.
        "pipenv run cp /tmp/e/settings.json .claude/",
        "eatmydata mv .claude /tmp/x",
        "gh release download v1",
        "gh run download 1 --dir=.claude",
        "cargo clean --target-dir .claude",
        "cargo clean --target-dir=.claude",
        "bunx rimraf .claude",
        "eatmydata rm -rf .cla*",
    ];
    each_is(&gate(&OWN, None), "ask", &commands).await;
}

#[tokio::test]
async fn a_place_is_named_behind_an_option_an_address_or_a_suffix() {
    let commands = [
        "cp -t .claude x",
        "pytest --junitxml=.claude/settings.json",
        "git fast-export --export-marks=.claude/settings.json HEAD",
        "some-tool -o=.claude/settings.json",
        "GIT_TRACE=/home/ann/desk/.claude/settings.json git status",
        "SSLKEYLOGFILE=.claude/settings.json curl https://x.example",
        "export GIT_TRACE=/home/ann/desk/.claude/settings.json; git status",
        "some-tool -r.claude/settings.json",
        "docker run -v ./.claude/settings.json:/x alpine rm /x",
        "cp -t.claude x",
        "go test -coverprofile=toolgate.toml ./...",
        "go test --cpuprofile toolgate.toml .",
        "gh release download v1 -O toolgate.toml",
        "curl -sw '%output{toolgate.toml}x' https://x.example",
        "curl --write-out '%{http_code}%output{>>.claude/settings.json}x' https://x.example",
        "git bundle create toolgate.toml HEAD",
        "git fast-export --export-marks=toolgate.toml HEAD",
        "git interpret-trailers --in-place toolgate.toml",
        "git subtree pull --prefix=.claude o main",
        "npx rimraf .claude",
        "rimraf toolgate.toml",
        "gio trash .claude",
        "cp --target-directory=.claude x",
        "install -t.claude x",
        "patch -d.claude -p1 < x.patch",
        "patch --directory=.claude < x.patch",
        "git apply --directory=.claude x.patch",
        "git -C . rm -r .claude",
        "git -C sub checkout toolgate.toml",
        "git diff --output=toolgate.toml",
        "git -C . apply <<'E'\n+++ b/.claude/settings.json\nE",
        "curl -o toolgate.toml https://x.example",
        "curl --output=toolgate.toml https://x.example",
        "curl -sLotoolgate.toml https://x.example",
        "curl --head -o toolgate.toml https://x.example",
        "curl -O https://x.example/toolgate.toml",
        "curl --output-dir .claude -o settings.json https://x.example",
        "wget https://x.example/toolgate.toml",
        "wget 'https://x.example/toolgate.toml?raw=1'",
        "wget https://x.example/settings.json -P .claude",
        "wget -O toolgate.toml https://x.example",
        "wget -P /tmp/x -O toolgate.toml https://x.example",
        "scp host:x toolgate.toml",
        "sed -Ei s/a/b/ toolgate.toml",
        "sed s/a/b/ -i\"$X\" toolgate.toml",
        "sed -i.json p .claude/settings",
        "sed --in-place=.json p .claude/settings",
        "sed -iml p toolgate.to",
        "cp -b -S .json x .claude/settings",
        "cp -bS.json x .claude/settings",
        "mv --su=.json x .claude/settings",
        "ln -sb --suffix .json x .claude/settings",
        "install -m 644 -b -S .json x .claude/settings",
        "rsync -bt --suffix=.json x .claude/settings",
        "script -qc 'cat e' toolgate.toml",
        "script -q -O toolgate.toml -c 'cat e'",
        "logsave toolgate.toml cat e",
        "git archive --o=toolgate.toml HEAD",
        "yq -i .a=1 toolgate.toml",
        "gzip toolgate.toml",
        "gzip -S.c toolgate.toml",
        "gzip -- -c toolgate.toml",
        "xz -Ccrc32 toolgate.toml",
        "gunzip -f toolgate.toml.gz",
        "gunzip toolgate.toml-gz",
        "zstd --rm toolgate.toml",
        "zstd -d toolgate.toml.zst",
        "unlz4 -l toolgate.toml.lz4",
        "brotli -d toolgate.toml.br",
        "zstd -d /opt/x.zst --output-dir-flat=.claude",
        "7z a -sdel x .claude",
        "7z a -SDEL /opt/x.7z /home/ann/desk/.claude",
        "rar m x .claude",
        "rar a -df x .claude",
        "python3 -m json.tool a.json toolgate.toml",
        "sd a b toolgate.toml",
        "git merge-file toolgate.toml a b",
        "git checkout-index -f toolgate.toml",
        "perl -i x.pl toolgate.toml",
        "perl -pi.bak x.pl toolgate.toml",
        "dos2unix toolgate.toml",
        "link x toolgate.toml",
        "sort --outp=toolgate.toml x",
        "sort -uo toolgate.toml x",
        "zip -m /tmp/a.zip toolgate.toml",
        "tar cf /tmp/a --remove-files toolgate.toml",
        "git archive -o toolgate.toml HEAD",
        "yq --inplace .a=1 toolgate.toml",
        "sed --in-place=.bak s/a/b/ toolgate.toml",
        "tar cf toolgate.toml src",
        "gcc -o toolgate.toml x.c",
        "find . -fprint toolgate.toml",
        "openssl rand -out toolgate.toml 8",
        "xxd -r x toolgate.toml",
        "xxd -r -ps in toolgate.toml",
        "xxd -r -cols 8 in toolgate.toml",
        "xxd -r -seek 0 in toolgate.toml",
        "rename s/a/b/ toolgate.toml",
        "sponge toolgate.toml",
        // As before.
        "cp -r x .claude/",
        "ln -s /tmp/x .claude",
        "rm -rf /home/ann",
        "mv /home/ann/desk elsewhere",
        "chmod -R 777 /home/ann",
        "find /home/ann -delete",
        "rsync -a x/ .claude/",
        "dd if=x of=toolgate.toml",
        "echo x | tee toolgate.toml",
        "busybox cp x toolgate.toml",
    ];
    each_is(&gate(&OWN, None), "deny", &commands).await;
}

#[tokio::test]
async fn everyday_commands_reach_nothing_of_it() {
    let commands = [
        "tar xzf a.tgz -C /tmp/x",
        "tar -xzf a.tgz -C build",
        "tar tzf a.tgz",
        "tar xOf a.tgz README",
        "tar czf a.tgz src",
        "mkdir -p build && cd build && tar xzf ../a.tgz",
        "cd /tmp/x && tar xf a.tgz",
        "(cd /tmp/x && tar xf a.tgz)",
        "cd /tmp/x && curl -sL https://x.example/a.tgz | tar xz",
        "cd /tmp/x && sudo tar xf a.tgz > log",
        "cd /tmp/x && cp ../a .",
        "unzip a.zip -d build",
        "unzip -qo a.zip -d /tmp/x",
        "unzip \"$ZIP\" -d build",
        "unzip -l a.zip",
        "unzip -p a.zip x | head",
        "7z x a.7z -o/tmp/x",
        "7z l a.7z",
        "python3 -m zipfile -l a.zip",
        "pip install requests",
        "sudo apt-get install -y unzip tar wget",
        "npm install",
        "npm install unzip",
        "sudo npm install -g unzip",
        "cargo build",
        "pip install x",
        "python3 -m pip install -t build x",
        "zip -r a.zip src",
        "rg x src",
        "grep -rn x src",
        "grep -r x . < /dev/null",
        "unrar x a.rar /tmp/x/",
        "find . | cpio -pd /tmp/x",
        "wget \"https://x.example/a-$V.tgz\"",
        "curl -LO \"https://x.example/tool-$(uname -m).tgz\"",
        "ls -o toolgate.toml",
        "git grep -o toolgate.toml",
        "git ls-files -o toolgate.toml",
        "yq --indent 2 . f.yml",
        "yq --input-format json . f",
        "git stash show -u",
        "git checkout topic",
        "git clone https://x.example/tools",
        "git clone https://x.example/a.git /tmp/a",
        "git clone \"$URL\"",
        "git checkout main",
        "git checkout -b fix",
        "git apply x.patch",
        "patch -p1 < x.patch",
        "git pull",
        "git stash",
        "git stash pop",
        "git bundle create /tmp/a.bundle HEAD",
        "go test -race -coverprofile=coverage.out ./...",
        "gh run download 1 -n logs -D /tmp/x",
        "gh release download v1 -p '*.tgz' --dir build",
        "gh pr create --title download --fill",
        "gh pr list --search download",
        "gh run view \"$ID\" --log",
        "cargo clean",
        "cargo clean --target-dir build/x",
        "curl -so /dev/null -w '%{http_code}' https://x.example",
        "npx rimraf dist",
        "git clean -n",
        "git clean -fd build",
        "git -C /home/ann/desk checkout main",
        "git -C /home/ann/desk status",
        "curl -O https://x.example/a.tgz",
        "curl -o /tmp/a.tgz \"$URL\"",
        "curl -sSf https://x.example | jq .",
        "wget https://x.example/a.tgz",
        "wget -qO- https://x.example",
        "wget \"$URL\"",
        "gzip -dc a.gz | head",
        "gunzip a.gz",
        "scp a.txt host:/tmp/",
        "grep -rn x /home/ann/desk",
        "grep -rn x .",
        "grep -o toolgate.toml README.md",
        "find . -name '*.rs'",
        "rsync -a --exclude=.claude src/ /tmp/x",
        "tar czf /tmp/a.tgz --exclude=.claude/settings.json src",
        "docker run -v /opt/x:/x alpine ls",
        "sed -i 's/DEBUG=//' config.ini",
        "sed -n 3p toolgate.toml",
        "cat toolgate.toml",
        "timeout 5 cat toolgate.toml",
        "less toolgate.toml",
        "git diff toolgate.toml",
        "git add toolgate.toml",
        "git commit -m toolgate.toml",
        "grep x toolgate.toml",
        "toolgate check --config toolgate.toml",
        "TOOLGATE_CONFIG=toolgate.toml toolgate check",
        "GIT_TRACE=/tmp/trace.log git status",
        "some-linter settings.json",
        "python3 -m json.tool a.json",
        "perl x.pl a.txt",
        "zstd -dc a.zst | head",
        "zstd a.txt",
        "7z a x.7z src",
        "rar a x src",
        "go build -o bin/x .",
        "make VERSION=$(git describe)",
        "time toolgate check --config toolgate.toml",
        "sudo cat notes.txt toolgate.toml",
        "uv run pytest toolgate.toml",
        "script -qc 'make test' /dev/null",
        "sed -i.bak 's/a/b/' settings",
        "cp -b -S .orig a.txt b.txt",
        "split -l 1000 data.csv part_",
        "csplit data.csv 10",
        "aws s3 cp . s3://bucket/ --recursive",
        "gcc -o \"$D/prog\" x.c",
        "gcc -o \"build/$NAME\" x.c",
        "git archive --output=\"x-$V.tar\" HEAD",
        "aws s3 cp s3://b/x.txt .",
        "aws s3 cp \"$FILE\" s3://b/",
        "docker-compose rm -f web",
        "hg mv a.txt b.txt",
        "uniq -c names.txt",
    ];
    each_is(&gate(&OWN, None), "allow", &commands).await;
}

#[tokio::test]
async fn a_search_above_a_place_reads_it() {
    let new = || gate(&["/home/ann/.local/state/toolgate"], Some("/home/ann/desk"));
    let refused = [
        "grep -r x /home/ann",
        "grep -rn x ..",
        "grep -rn x ../.local",
        "grep -rne x ..",
        "egrep -R x /home/ann/.local",
        "rg x /",
        "rg x ../..",
        "cd .. && grep -r x .",
        "cd .. && rg x",
        "cd /home/ann; rg x",
        "cd /home/ann && rg x",
        "cd src && cd ../.. && rg x",
        "env -C /home/ann grep -r x .",
        "sudo grep -r x /home/ann",
        "tar czf a.tgz /home/ann",
        "tar czf a.tgz -C /home/ann .",
        "zip -r a.zip ..",
        "scp -r /home/ann host:",
        "diff -r /home/ann /tmp/x",
        "grep -r --exclude-dir=.git x /home/ann",
        "grep -r --binary x /home/ann/.local",
        "rg --ignore x /home/ann/.local",
        "ag -C key /home/ann",
        "ag -t key /home/ann",
        "ag -t key /home/ann src",
        "ack --match=key /home/ann src",
        "tar czf a.tgz --exclude=.local /home/ann",
        "tar czf a.tgz /home/ann --exclude=.local",
        "tar czf a.tgz --anchored --exclude=.local /home/ann",
        "tar --no-wildcards --exclude='.l*' -cf x.tar /home/ann",
        "tar -cf x.tar --add-file=/home/ann",
        "cd /opt && tar -cf o.tar --label -x /home/ann/.local",
        "cd /opt && tar -cf o.tar --some-option -x /home/ann/.local",
        "jar cf /opt/x.jar /home/ann/.local",
        "cd /home/ann; tar czf a.tgz . -C /tmp x",
        "diff -r --from-file=/home/ann /tmp/e",
        "git diff --no-index /tmp/e /home/ann/.local",
        "git diff /tmp/e /home/ann/.local",
        "cd /home/ann && git grep --no-index key",
        "env -C/home/ann rg key",
        "env --chd=/home/ann rg key",
        "sudo -D/home/ann rg key",
        "cd /home/ann; grep -r key </dev/null",
        "cd /home/ann; true | grep -r key",
        "cd /home/ann; rg key </dev/null",
        "cd /home/ann; ag -m 5 key",
        "cd ..; cd . && rg key",
        // What is left out are files, or directories, and who knows which of them it is.
        "grep -r --exclude=.local x /home/ann",
        "grep -r --exclude-dir=toolgate x /home/ann",
        "cat /home/ann/.local/state/toolgate/key",
    ];
    each_is(&new(), "deny", &refused).await;
    let asked = [
        "grep -r x /home/ann/.*",
        "curl 'file:///home/ann/.local/state/{toolgate}/ledger.db'",
        "curl --url 'file:///home/ann/.local/state/tool[g-g]ate/ledger.db'",
        "find /home/ann -name key -exec cat {} +",
        "find .. -type f | xargs cat",
        "grep -r x ~other",
        "cd ~other; rg key",
        "cd ~-; rg key",
        "cd ~other/..; rg key src",
        "sudo -i rg key",
        "sudo -u ann -i rg key",
        "cd /usr; cd /tmp; cd /var; cd /etc; cd /opt; cd /srv; cd /home/ann; rg key",
        "cd a; cd b; cd c; cd d; cd e; cd f; cd g; cd /home; rg key ann",
    ];
    each_is(&new(), "ask", &asked).await;
    let allowed = [
        "grep -rn x .",
        "grep -rn x src",
        "grep -rn x",
        "rg x",
        "rg -g '*.rs' x src",
        "grep -rn x /home/ann/desk",
        "cd /home/ann/other && grep -rn x .",
        "grep x ..",
        "ps aux | grep x",
        "ls -R /home/ann",
        "find /home/ann -name '*.log'",
        "find . -name '*.rs' -exec grep -l x {} +",
        "rg --files /home/ann",
        "grep -r --exclude-dir=.local x /home/ann",
        "grep -r --exclude-dir '.l*' x /home/ann",
        "cd .. && ls",
        "cd /home/ann; ls; cd desk && rg x",
        "time grep -rn cd .",
        "sudo -u ann grep -ri x .",
        "sudo grep -rC3 x src",
        "grep -r x . < /dev/null",
        "ag x src",
        "ag -C 3 x src",
        "rg -C3 x src",
        "tar czf a.tgz src",
        "zip -r a.zip src",
        "git diff main topic -- src",
        "git grep x",
        "grep -r x \"$DIR\"",
    ];
    each_is(&new(), "allow", &allowed).await;
}

#[tokio::test]
async fn a_place_in_the_directory_where_a_search_begins_is_read_by_it() {
    let new = || gate(&["/home/ann/desk/ledger.db", "/home/ann/desk/ledger.db.state"], Some("/home/ann/desk"));
    let refused = ["grep -rn x .", "grep -rn x", "rg x", "rg x /home/ann/desk", "tar czf /tmp/a.tgz .", "cd src; rg x"];
    each_is(&new(), "deny", &refused).await;
    each_is(&new(), "ask", &["grep -rn x *"]).await;
    let allowed = [
        "grep -rn x src",
        "cd src && rg x",
        "rg x src tests",
        "cat a | rg x",
        "git grep x",
        "tar czf a.tgz -C /tmp/x .",
        "grep -rn --exclude='ledger.db*' --exclude-dir='ledger.db*' x .",
    ];
    each_is(&new(), "allow", &allowed).await;
}

#[tokio::test]
async fn who_goes_home_in_other_words_searches_there() {
    let new = || gate(&["~/.local/state/toolgate"], Some("/nowhere/desk"));
    each_is(&new(), "deny", &["cd; rg key", "cd --; rg key", "cd -P; rg key", "cd -P && rg key", "cd ~ && rg key"]).await;
    each_is(&new(), "allow", &["rg key", "cd src; rg key", "time grep -rn cd ."]).await;
}

#[tokio::test]
async fn a_star_in_a_place_is_seen_from_above() {
    let places = ["/home/*/.ssh"];
    each_is(&gate(&places, Some("/home/ann/desk")), "deny", &["grep -r x /home/ann", "rg x /home", "cd .. && rg x"]).await;
    each_is(&gate(&places, Some("/home/ann/desk")), "allow", &["grep -rn x .", "rg x src", "grep -r x /srv/ann"]).await;
    each_is(&gate(&places, None), "ask", &["tar xf a -C /home/ann"]).await;
    each_is(&gate(&places, None), "allow", &["tar xf a -C /home/ann/desk/build"]).await;
}

#[tokio::test]
async fn a_tree_that_is_only_read_counts_unless_it_is_said_not_to() {
    let with = |trees: &str| {
        let text = format!(
            "[[policy]]\nname = \"own\"\nrule = \"deny\"\ntools = [\"bash\"]\nreason = \"No.\"\n\
             where = [{{ argument = \"/command\", touches = [\"~/.ssh\"], lenient = true{trees} }}]\n"
        );
        let schema = json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]});
        let agent = Agent::builder("coder")
            .tool(Tool::external("bash", "Runs a command.", Some(schema)).shell("/command"))
            .rules(toolgate::config::Rules::parse("rules.toml", &text));
        crate::support::gate().agent(agent.build().unwrap()).built()
    };
    let commands = ["tar czf - ~/", "grep -r . ~/", "zip -r a.zip ~"];
    each_is(&with(""), "deny", &commands).await;
    each_is(&with(", trees = true"), "deny", &commands).await;
    each_is(&with(", trees = false"), "allow", &commands).await;
    each_is(&with(", trees = false"), "deny", &["rm -r ~/", "cat ~/.ssh/key"]).await;
    each_is(&with(""), "allow", &["grep -rn x .", "tar czf a.tgz src", "cat \"$FILE\""]).await;
}

#[tokio::test]
async fn who_goes_through_many_directories_may_be_anywhere() {
    let command = format!("env {}rg key", (0..300).map(|n| format!("-C a{n} ")).collect::<String>());
    each_is(&gate(&OWN, Some("/home/ann/desk")), "ask", &[command.as_str()]).await;
}

#[tokio::test]
async fn a_tool_that_searches_is_told_where_not_to() {
    let places = vec!["/home/ann/.local/state/toolgate".to_owned()];
    let searches = |from: &str| {
        let condition =
            Condition::Touches { places: places.clone(), lenient: true, trees: false, whole: false, from: Some(from.to_owned()) };
        let agent = Agent::builder("coder")
            .tool(Tool::external("grep", "Searches.", None).effect(toolgate::Effect::Read))
            .policy(Deny::new("own", ["grep"]).when("/path", condition).reason("Not for agents."));
        crate::support::gate().agent(agent.build().unwrap()).built()
    };
    let (below, above) = (searches("/home/ann/desk"), searches("/home/ann"));
    let cases = [
        (&below, json!({"pattern": "x"}), true),
        (&below, json!({"pattern": "x", "path": null}), true),
        (&below, json!({"pattern": "x", "path": ""}), true),
        (&below, json!({"pattern": "x", "path": "src"}), true),
        (&below, json!({"pattern": "/home/ann"}), true),
        (&below, json!({"pattern": "x", "path": "/home/ann/desk"}), true),
        (&below, json!({"pattern": "x", "path": "/home/ann/.local/state/other"}), true),
        (&below, json!({"pattern": "x", "path": ".."}), false),
        (&below, json!({"pattern": "x", "path": "/"}), false),
        (&below, json!({"pattern": "x", "path": "/home//ann/./desk/.."}), false),
        (&below, json!({"pattern": "x", "path": "/proc/self/root/home"}), false),
        (&below, json!({"pattern": "x", "path": ["src", "/home/ann"]}), false),
        (&below, json!({"pattern": "x", "path": "/home/ann/.local/state/toolgate/keys"}), false),
        (&above, json!({"pattern": "x"}), false),
        (&above, json!({"pattern": "x", "path": null}), false),
        (&above, json!({"pattern": "x", "path": []}), false),
        (&above, json!({"pattern": "x", "path": [null]}), false),
        (&above, json!({"pattern": "x", "path": {}}), false),
        (&below, json!({"pattern": "x", "path": []}), true),
        (&above, json!({"pattern": "x", "path": ["desk"]}), true),
        (&above, json!({"pattern": "x", "path": "."}), false),
        (&above, json!({"pattern": "x", "path": "desk"}), true),
    ];
    for (n, (gate, arguments, passes)) in cases.into_iter().enumerate() {
        let answer = gate.session("coder", "alice", &format!("s{n}")).admit("grep", arguments.clone()).await;
        assert_eq!(answer.is_ok(), passes, "{arguments}");
    }
}

#[test]
fn where_a_search_begins_is_a_whole_path() {
    let text = "[[policy]]\nname = \"r\"\nrule = \"deny\"\ntools = [\"bash\"]\nwhere = [{ touches = [\"/x\"], from = \"here\" }]\n";
    let rules = toolgate::config::Rules::parse("rules.toml", text);
    let problems: Vec<String> = rules.problems().iter().map(ToString::to_string).collect();
    assert!(problems.iter().any(|problem| problem.contains("`from` is the whole path of a directory")), "{problems:?}");
}
